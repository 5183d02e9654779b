"""Completions: prompts, choices, echoed prompts and log probabilities."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from caravan_dialects.api.generation.checks import choice_seed
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.errors import GenerationError
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import Service, events
from caravan_testing.scripted_engine import CHAT_MODEL, EOS_TOKEN, Step, word

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
}
MESSAGES = [{"role": "user", "content": "x"}]
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think> </think> #}"


async def complete(service: Service, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply("/v1/completions", {"model": "any", **body})
    return reply


async def stream(service: Service, **body: Any) -> list[Any]:
    return await service.events("/v1/completions", {"model": "any", "stream": True, **body})


async def test_a_whole_reply(service: Service) -> None:
    reply = await complete(service, prompt="hi", max_tokens=2, user="me")
    assert reply.pop("id").startswith("cmpl-")
    assert reply.pop("created") > 0
    assert reply == {
        "object": "text_completion",
        "model": "scripted",
        "system_fingerprint": "f" * 16,
        "choices": [
            {
                "index": 0,
                "text": " w1 w2",
                "logprobs": None,
                "finish_reason": "length",
                "prompt_logprobs": None,
                "prompt_token_ids": None,
            }
        ],
        "usage": USAGE,
    }


async def test_max_tokens_is_16_by_default(service: Service) -> None:
    await complete(service, prompt="hi", max_tokens=None)
    assert service.engine.spec.stopping.max_new_tokens == 16


async def test_parameters_reach_the_engine(service: Service) -> None:
    await complete(
        service,
        prompt="hi",
        temperature=0.5,
        top_p=1.0,
        top_k=-1,
        min_p=0.1,
        seed=-2,
        repetition_penalty=1.5,
        frequency_penalty=-1,
        presence_penalty=2,
        ignore_eos=True,
        logprobs=3,
    )
    sampling = service.engine.spec.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 1.0, 0, 0.1)
    assert sampling.seed == 2**64 - 2
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, -1.0, 2.0)
    assert (sampling.logprobs, sampling.top_n_tokens) == (True, 3)
    assert service.engine.spec.stopping.ignore_eos


async def test_biases_reach_the_engine_for_every_choice(service: Service) -> None:
    await complete(service, prompt=["hi", "ho"], n=2, logit_bias={"0": -100, "999": 1.5, "7": 0})
    assert [stream.spec.sampling.biases for stream in service.engine.streams] == [((0, -100.0), (999, 1.5))] * 4


@pytest.mark.parametrize(("temperature", "expected"), [(None, 1.0), (0, 0.0)])
async def test_temperature_is_one_by_default_and_zero_is_greedy(
    service: Service, temperature: float | None, expected: float
) -> None:
    await complete(service, prompt="hi", temperature=temperature)
    assert service.engine.spec.sampling.temperature == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (["a", "b"], [(1, 100 + 97), (1, 100 + 98)]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ],
)
async def test_prompts_are_texts_or_tokens(service: Service, prompt: Any, expected: list[tuple[int, ...]]) -> None:
    reply = await complete(service, prompt=prompt)
    assert [stream.spec.prompt for stream in service.engine.streams] == expected
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(expected)))


async def test_a_stream_ends_with_usage_if_requested_and_done(service: Service) -> None:
    *chunks, usage, done = await stream(service, prompt="hi", max_tokens=2, stream_options={"include_usage": True})
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [" w1", " w2"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == USAGE
    assert done == "[DONE]"


async def test_a_stream_has_no_usage_by_default(service: Service) -> None:
    chunk, _ = await stream(service, prompt="hi", max_tokens=1)
    assert "usage" not in chunk


async def test_chunks_of_several_prompts_have_the_index_of_their_choice(service: Service) -> None:
    chunks = (await stream(service, prompt=["a", "b", "c"], max_tokens=3))[:-1]
    texts = ["", "", ""]
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [" w1 w2 w3"] * 3
    # Chunks of different choices are interleaved.
    assert [chunk["choices"][0]["index"] for chunk in chunks[:3]] == [0, 1, 2]


async def test_control_tokens_and_incomplete_characters_add_no_chunk(service: Service) -> None:
    smile = "🙂".encode()
    service.engine.script = lambda _: [word(smile[:2]), word(smile[2:]), word("<s>", special=True), EOS_TOKEN]
    *chunks, _ = await stream(service, prompt="x")
    assert [(chunk["choices"][0]["text"], chunk["choices"][0]["finish_reason"]) for chunk in chunks] == [
        ("🙂", None),
        ("", "stop"),
    ]


@pytest.mark.parametrize("stop", [".", [".", "zz"]])
async def test_stop_is_a_string_or_a_list_and_is_not_in_the_text(service: Service, stop: Any) -> None:
    service.engine.script = lambda _: [word("a.b"), EOS_TOKEN]
    [choice] = (await complete(service, prompt="x", stop=stop))["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("a", "stop")


async def test_logprobs_are_columns_with_an_entry_per_token(service: Service) -> None:
    [choice] = (await complete(service, prompt="x", max_tokens=2, logprobs=1))["choices"]
    assert choice["logprobs"] == {
        "tokens": [" w1", " w2"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{" a0": -1.0, " w1": -0.5}, {" a0": -1.0, " w2": -0.5}],
        "text_offset": [0, 3],
    }


async def test_text_offsets_continue_across_chunks(service: Service) -> None:
    chunks = (await stream(service, prompt="x", max_tokens=2, logprobs=0))[:-1]
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks] == [[0], [3]]
    assert chunks[0]["choices"][0]["logprobs"]["top_logprobs"] is None


async def test_an_error_in_a_started_stream_ends_all_choices(service: Service) -> None:
    def script(spec: GenerationSpec) -> list[Step]:
        return [word("a"), GenerationError("gone") if spec.prompt == (5,) else word("b"), EOS_TOKEN]

    service.engine.script = script
    *_, error, done = await stream(service, prompt=[[5], [6]])
    assert error["error"] == {
        "message": "Request failed during generation: gone",
        "type": "server_error",
        "param": None,
        "code": "generation",
    }
    assert done == "[DONE]"


async def test_an_error_before_a_stream_starts_has_its_status(service: Service) -> None:
    response = await service.post("/v1/completions", {"prompt": "", "stream": True})
    assert response.status == 400
    assert await response.json() == {
        "error": {
            "message": "Input validation error: `prompt` cannot be empty",
            "type": "invalid_request_error",
            "param": "prompt",
            "code": "validation",
        }
    }


def one_by_one(service: Service, *texts: tuple[str, float]) -> Callable[[GenerationSpec], list[Step]]:
    """Return a script in which each candidate outputs the next of ``texts``: two tokens with the given mean logprob."""

    def script(_: GenerationSpec) -> list[Step]:
        text, mean = texts[len(service.engine.streams) % len(texts)]
        return [
            word(text, logprob=mean - 0.5),
            word("!", finish=FinishReason.LENGTH, logprob=mean + 0.5),
        ]

    return script


async def choices_of(service: Service, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = await service.reply("/v1/completions", body)
    return reply


async def test_choices_are_numbered_by_prompt_and_usage_counts_each_prompt_once(service: Service) -> None:
    service.engine.script = one_by_one(service, ("a", -1), ("b", -1), ("c", -1), ("d", -1))
    response = await service.post("/v1/completions", {"prompt": ["x", "yz"], "n": 2})
    reply = await response.json()
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [
        (0, "a!"),
        (1, "b!"),
        (2, "c!"),
        (3, "d!"),
    ]
    assert [len(stream.spec.prompt) for stream in service.engine.streams] == [2, 2, 3, 3]
    usage = reply["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 8, 13)
    headers = response.headers
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("5", "8")
    assert headers["x-compute-characters"] == "3"
    # Logprobs are computed only for clients that want them and for ranking.
    assert not service.engine.spec.sampling.logprobs


async def test_candidates_are_ranked_by_mean_logprob(service: Service) -> None:
    service.engine.script = one_by_one(service, ("a", -3), ("b", -1), ("c", -2), ("d", -1))
    reply = await choices_of(service, prompt="x", n=2, best_of=4)
    assert [(choice["index"], choice["text"], choice["logprobs"]) for choice in reply["choices"]] == [
        (0, "b!", None),
        (1, "d!", None),
    ]
    # Usage counts all four candidates.
    assert reply["usage"]["completion_tokens"] == 8
    assert all(stream.spec.sampling.logprobs for stream in service.engine.streams)


async def test_answers_of_a_chat_are_ranked_by_mean_logprob(service: Service) -> None:
    service.engine.model = CHAT_MODEL
    service.engine.script = one_by_one(service, ("a", -3), ("b", -1), ("c", -2), ("d", -1))
    body = {"messages": MESSAGES, "n": 2, "best_of": 4}
    reply = await service.reply("/v1/chat/completions", body)
    assert [(one["index"], one["message"]["content"], one["logprobs"]) for one in reply["choices"]] == [
        (0, "b!", None),
        (1, "d!", None),
    ]
    assert reply["usage"]["completion_tokens"] == 8
    reply = await service.reply("/v1/chat/completions", body | {"n": 1, "logprobs": True})
    [choice] = reply["choices"]
    assert choice["message"]["content"] == "b!"
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-1.5, -0.5]


async def test_a_prediction_for_vertex_is_the_best_answer_of_its_chat(service: Service) -> None:
    service.engine.model = CHAT_MODEL
    service.engine.script = one_by_one(service, ("a", -3), ("b", -1), ("c", -2))
    instances = [{"messages": MESSAGES, "best_of": 3}]
    assert await service.reply("/vertex", {"instances": instances}) == {"predictions": ["b!"]}


async def test_thoughts_of_all_candidates_count(service: Service) -> None:
    service.engine.model = replace(CHAT_MODEL, chat_template=THINKING)
    outputs = [["<think>", "x", "</think>", "a"], ["<think>", "x", "y", "</think>", "b"]]

    def script(_: GenerationSpec) -> list[Step]:
        *before, last = outputs[len(service.engine.streams)]
        mean = -2.0 + len(service.engine.streams)
        return [*(word(one, logprob=mean) for one in before), word(last, finish=FinishReason.LENGTH, logprob=mean)]

    service.engine.script = script
    reply = await service.reply("/v1/chat/completions", {"messages": MESSAGES, "best_of": 2})
    [choice] = reply["choices"]
    assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("xy", "b")
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3


async def test_a_streamed_chat_cannot_be_ranked(service: Service) -> None:
    service.engine.model = CHAT_MODEL
    body = {"messages": MESSAGES, "best_of": 3, "n": 2, "stream": True}
    response = await service.post("/v1/chat/completions", body)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "best_of")
    assert error["message"].endswith("`best_of` > `n` is not supported when streaming. Given: `best_of` 3 and `n` 2")
    assert len(await service.events("/v1/chat/completions", body | {"n": 3})) > 3


async def test_candidates_are_ranked_within_their_prompt(service: Service) -> None:
    service.engine.script = one_by_one(service, ("a", -2), ("b", -1), ("c", -1), ("d", -2))
    reply = await choices_of(service, prompt=["x", "y"], best_of=2, logprobs=0)
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [(0, "b!"), (1, "c!")]
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-1.5, -0.5]


async def test_the_rank_does_not_depend_on_length(service: Service) -> None:
    def script(_: GenerationSpec) -> list[Step]:
        if not service.engine.streams:
            return [word("short", finish=FinishReason.LENGTH, logprob=-1.0)]
        return [word("long", logprob=-0.9), word("er", finish=FinishReason.LENGTH, logprob=-0.9)]

    service.engine.script = script
    [choice] = (await choices_of(service, prompt="x", best_of=2))["choices"]
    assert choice["text"] == "longer"


async def test_streamed_chunks_have_the_index_of_their_choice(service: Service) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events(await (await service.post("/v1/completions", body)).text())
    texts = [""] * 4
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert texts == [" w1 w2 w3"] * 4
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (4, 12)
    assert done == "[DONE]"


async def test_best_of_equal_to_n_may_stream(service: Service) -> None:
    body = {"prompt": "x", "n": 2, "best_of": 2, "max_tokens": 1, "stream": True}
    assert len(events(await (await service.post("/v1/completions", body)).text())) == 3


async def test_choices_have_different_seeds(service: Service) -> None:
    await choices_of(service, prompt="x", n=3, seed=7, max_tokens=1)
    seeds = [stream.spec.sampling.seed for stream in service.engine.streams]
    assert seeds == [7, choice_seed(7, 1), choice_seed(7, 2)]


async def test_greedy_choices_have_no_seed(service: Service) -> None:
    await choices_of(service, prompt="x", n=2, seed=7, temperature=0, max_tokens=1)
    assert [stream.spec.sampling.seed for stream in service.engine.streams] == [0, 0]


async def test_choice_parameters_override_the_request(service: Service) -> None:
    choices = [
        {},
        {"temperature": 0.5, "top_k": 5, "seed": -2},
        {"temperature": 0, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "seed": None},
        {"frequency_penalty": 1, "presence_penalty": -1},
    ]
    await choices_of(
        service, prompt="x", n=4, choice_parameters=choices, temperature=0.75, top_k=9, seed=3, max_tokens=1
    )
    samplings = [stream.spec.sampling for stream in service.engine.streams]
    assert [(s.temperature, s.top_k, s.seed) for s in samplings] == [
        (0.75, 9, 3),
        (0.5, 5, 2**64 - 2),
        (0.0, 9, 0),
        (0.75, 9, choice_seed(3, 3)),
    ]
    assert (samplings[2].top_p, samplings[2].min_p, samplings[2].repetition_penalty) == (0.5, 0.25, 1.5)
    assert (samplings[3].frequency_penalty, samplings[3].presence_penalty) == (1.0, -1.0)


async def test_choice_parameters_apply_to_candidates_of_a_chat(service: Service) -> None:
    service.engine.model = CHAT_MODEL
    choices = [{"top_k": rank} for rank in range(1, 4)]
    body = {"messages": MESSAGES, "best_of": 3, "choice_parameters": choices, "max_tokens": 1}
    await service.reply("/v1/chat/completions", body)
    assert [stream.spec.sampling.top_k for stream in service.engine.streams] == [1, 2, 3]


async def test_choice_parameters_apply_to_candidates(service: Service) -> None:
    choices = [{"top_k": rank} for rank in range(1, 4)]
    await choices_of(service, prompt=["x", "y"], best_of=3, choice_parameters=choices, logprobs=0, max_tokens=1)
    assert [stream.spec.sampling.top_k for stream in service.engine.streams] == [1, 2, 3] * 2


async def test_cached_tokens_count_the_first_choice_of_each_prompt(service: Service) -> None:
    def cached(spec: GenerationSpec) -> int:
        position = [id(stream.spec) for stream in service.engine.streams].index(id(spec))
        return 100 if position % 2 else 1

    service.engine.cached_tokens = cached
    reply = await choices_of(service, prompt=["x", "y"], n=2, max_tokens=1)
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


TGI_BEST_OF = {"best_of": 3, "do_sample": True}


async def test_the_details_of_tgis_best_of_have_the_other_candidates(service: Service) -> None:
    service.engine.script = one_by_one(service, ("a", -2), ("b", -1), ("c", -3))
    service.engine.cached_tokens = lambda _: 1
    parameters = TGI_BEST_OF | {"details": True, "return_full_text": True}
    response = await service.post("/generate", {"inputs": "x", "parameters": parameters})
    reply = await response.json()
    assert reply["generated_text"] == "xb!"
    details = reply["details"]
    assert details["cached_tokens"] == 1
    assert [token["text"] for token in details["tokens"]] == ["b", "!"]
    seeds = [stream.spec.sampling.seed for stream in service.engine.streams]
    assert details["seed"] == seeds[1] == choice_seed(seeds[0], 1)
    first, second = details["best_of_sequences"]
    assert first == {
        "generated_text": "xa!",
        "finish_reason": "length",
        "generated_tokens": 2,
        "seed": seeds[0],
        "prefill": [],
        "tokens": [
            {"id": 10, "text": "a", "logprob": -2.5, "special": False},
            {"id": 10, "text": "!", "logprob": -1.5, "special": False},
        ],
    }
    assert second["generated_text"] == "xc!"
    assert (response.headers["x-prompt-tokens"], response.headers["x-generated-tokens"]) == ("2", "6")


@pytest.mark.parametrize("path", ["/", "/generate"])
async def test_tgis_best_of_without_details(service: Service, path: str) -> None:
    service.engine.script = one_by_one(service, ("a", -2), ("b", -1), ("c", -3))
    reply = await (await service.post(path, {"inputs": "x", "parameters": TGI_BEST_OF})).json()
    assert (reply[0] if path == "/" else reply) == {"generated_text": "b!"}


async def test_details_of_a_single_candidate_have_no_other_candidates(service: Service) -> None:
    parameters = {"best_of": 1, "details": True, "max_new_tokens": 1}
    reply = await (await service.post("/generate", {"inputs": "x", "parameters": parameters})).json()
    assert "best_of_sequences" not in reply["details"]
    assert "top_tokens" not in reply["details"]


async def test_info_has_the_limit_of_best_of(service: Service) -> None:
    assert (await (await service.client.get("/info")).json())["max_best_of"] == service.limits.max_best_of == 16


async def echo(service: Service, **body: Any) -> dict[str, Any]:
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
    [choice] = (await echo(service, prompt="hi", max_tokens=2, echo=True, logprobs=1))["choices"]
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
    reply = await echo(service, prompt=["a", "b"], echo=True, logprobs=0, n=2, best_of=3)
    assert [choice["text"] for choice in reply["choices"]] == ["a w1", "a w1", "b w1", "b w1"]
    assert all(choice["logprobs"]["token_logprobs"] == [None, -0.25, -0.5] for choice in reply["choices"])
    assert [one.spec.prompt_logprobs for one in service.engine.streams] == [True, False, False] * 2


async def test_every_choice_of_a_stream_computes_prompt_logprobs(service: Service) -> None:
    body = {"prompt": "a", "max_tokens": 1, "echo": True, "logprobs": 0, "n": 2, "stream": True}
    chunks = events(await (await service.post("/v1/completions", body)).text())[:-1]
    assert sorted(chunk["choices"][0]["index"] for chunk in chunks) == [0, 1]
    assert all(chunk["choices"][0]["logprobs"]["token_logprobs"] == [None, -0.25, -0.5] for chunk in chunks)


async def test_vllms_prompt_logprobs(service: Service) -> None:
    reply = await echo(service, prompt="h", prompt_logprobs=2, logprobs=1, n=2)
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
    [choice] = (await echo(service, **body))["choices"]
    assert choice["prompt_logprobs"] == [None, {"204": {"logprob": -0.25, "rank": None, "decoded_token": "h"}}]
    assert [len(top or ()) for top in choice["logprobs"]["top_logprobs"]] == [0, 3, 3]


async def test_prompt_logprobs_are_null_by_default(service: Service) -> None:
    [choice] = (await echo(service, prompt="h", prompt_logprobs=None))["choices"]
    assert choice["prompt_logprobs"] is None
    assert choice["logprobs"] is None
