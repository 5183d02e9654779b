from typing import Any

import pytest

from caravan_scheduler.core.errors import GenerationError
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import Service
from caravan_testing.scripted_engine import EOS_TOKEN, Step, word

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 0},
}


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
