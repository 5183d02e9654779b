"""``echo`` and ``prompt_logprobs``, which clients use to score prompts."""

from typing import Any

import pytest

from caravan_testing.http_server import Service, events


async def complete(service: Service, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply("/v1/completions", {"max_tokens": 1, **body})
    return reply


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("hi é", ["hi é w1"]),
        (["a", "b"], ["a w1", "b w1"]),
        # The echo of token ids includes control tokens.
        ([1, 204, 205], ["<s>hi w1"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_prompt_comes_before_the_text(
    service: Service, prompt: Any, texts: list[str], *, stream: bool
) -> None:
    response = await service.post(
        "/v1/completions", {"prompt": prompt, "max_tokens": 1, "echo": True, "stream": stream}
    )
    found = [""] * len(texts)
    chunks = events(await response.text())[:-1] if stream else [await response.json()]
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] += choice["text"]
            assert choice["logprobs"] is None
    assert found == texts
    assert not any(stream.spec.prompt_logprobs for stream in service.engine.streams)


COLUMNS = {
    "tokens": ["", "h", "i", " w1", " w2"],
    "token_logprobs": [None, -0.25, -0.25, -0.5, -0.5],
    "top_logprobs": [
        None,
        {" p0": -2.0, "h": -0.25},
        {" p0": -2.0, "i": -0.25},
        {" a0": -1.0, " w1": -0.5},
        {" a0": -1.0, " w2": -0.5},
    ],
    "text_offset": [0, 0, 1, 2, 5],
}


async def test_prompt_logprobs_precede_those_of_the_text(service: Service) -> None:
    [choice] = (await complete(service, prompt="hi", max_tokens=2, echo=True, logprobs=1))["choices"]
    shown = {"index": 0, "text": "hi w1 w2", "logprobs": COLUMNS, "finish_reason": "length"}
    assert choice == shown | {"prompt_logprobs": None, "prompt_token_ids": None}


async def test_streamed_chunks_join_to_the_whole_reply(service: Service) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "echo": True, "logprobs": 1, "stream": True}
    chunks = events(await (await service.post("/v1/completions", body)).text())[:-1]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == "hi w1 w2"
    for column, values in COLUMNS.items():
        assert [value for choice in choices for value in choice["logprobs"][column]] == values


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_0_returns_only_the_prompt(service: Service, *, stream: bool) -> None:
    body = {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": 0, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    response = await service.post("/v1/completions", body)
    if stream:
        chunk, last, _ = events(await response.text())
    else:
        chunk = last = await response.json()
    assert chunk["choices"] == [
        {
            "index": 0,
            "text": "hi",
            "logprobs": {
                "tokens": ["", "h", "i"],
                "token_logprobs": [None, -0.25, -0.25],
                "top_logprobs": None,
                "text_offset": [0, 0, 1],
            },
            "finish_reason": "length",
        }
        | ({} if stream else {"prompt_logprobs": None, "prompt_token_ids": None})
    ]
    # A step over a prompt always yields a token, which is neither returned nor counted here.
    assert service.engine.spec.stopping.max_new_tokens == 1
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (3, 0)


async def test_choices_of_a_whole_reply_share_prompt_logprobs(service: Service) -> None:
    reply = await complete(service, prompt=["a", "b"], echo=True, logprobs=0, n=2, best_of=3)
    assert [choice["text"] for choice in reply["choices"]] == ["a w1", "a w1", "b w1", "b w1"]
    assert all(choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5] for choice in reply["choices"])
    assert [one.spec.prompt_logprobs for one in service.engine.streams] == [True, False, False] * 2


async def test_every_choice_of_a_stream_computes_prompt_logprobs(service: Service) -> None:
    body = {"prompt": "a", "max_tokens": 1, "echo": True, "logprobs": 0, "n": 2, "stream": True}
    chunks = events(await (await service.post("/v1/completions", body)).text())[:-1]
    assert sorted(chunk["choices"][0]["index"] for chunk in chunks) == [0, 1]
    assert all(chunk["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.25, -0.5] for chunk in chunks)


async def test_vllms_prompt_logprobs(service: Service) -> None:
    reply = await complete(service, prompt="h", prompt_logprobs=2, logprobs=1, n=2)
    expected = [
        None,
        {
            "30": {"logprob": -2.0, "rank": 1, "decoded_token": " p0"},
            "31": {"logprob": -3.0, "rank": 2, "decoded_token": " p1"},
            # The rank of a token beyond the likeliest ones is unknown.
            "204": {"logprob": -0.25, "rank": None, "decoded_token": "h"},
        },
    ]
    for choice in reply["choices"]:
        assert choice["prompt_logprobs"] == expected
        # The text has the number of alternatives that ``logprobs`` sets.
        assert choice["text"] == " w1"
        assert choice["logprobs"]["top_logprobs"] == [{" a0": -1.0, " w1": -0.5}]
    assert [one.spec.prompt_logprobs for one in service.engine.streams] == [True, False]


async def test_prompt_logprobs_may_be_fewer_than_logprobs(service: Service) -> None:
    body = {"prompt": "h", "prompt_logprobs": 0, "echo": True, "logprobs": 2, "max_tokens": 1}
    [choice] = (await complete(service, **body))["choices"]
    assert choice["prompt_logprobs"] == [None, {"204": {"logprob": -0.25, "rank": None, "decoded_token": "h"}}]
    assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, 3, 3]


async def test_prompt_logprobs_are_null_by_default(service: Service) -> None:
    [choice] = (await complete(service, prompt="h", prompt_logprobs=None))["choices"]
    assert choice["prompt_logprobs"] is None
    assert choice["logprobs"] is None
