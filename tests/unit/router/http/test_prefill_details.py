"""TGI's ``decoder_input_details``: the prompt's tokens with their log probabilities."""

from typing import Any

import pytest

from caravan_testing.http_server import Service, events


async def generate(service: Service, path: str = "/generate", **parameters: Any) -> dict[str, Any]:
    parameters = {"decoder_input_details": True, "max_new_tokens": 1, **parameters}
    reply = await service.reply(path, {"inputs": "hi", "parameters": parameters})
    return dict(reply[0] if path == "/" else reply)


PREFILL = [
    {"id": 1, "text": "<s>", "logprob": None},
    {"id": 204, "text": "h", "logprob": -0.25},
    {"id": 205, "text": "i", "logprob": -0.25},
]


@pytest.mark.parametrize("path", ["/generate", "/"])
async def test_details_include_prompt_tokens(service: Service, path: str) -> None:
    details = (await generate(service, path))["details"]
    assert details["prefill"] == PREFILL
    assert [token["logprob"] for token in details["tokens"]] == [-0.5]


async def test_truncated_tokens_are_in_the_full_text_but_not_in_the_details(service: Service) -> None:
    reply = await generate(service, truncate=2, return_full_text=True)
    assert reply["generated_text"] == "hi w1"
    assert reply["details"]["prefill"] == [PREFILL[0], PREFILL[2]]


async def test_candidates_share_prompt_tokens(service: Service) -> None:
    details = (await generate(service, best_of=3, do_sample=True))["details"]
    assert [details["prefill"], *(other["prefill"] for other in details["best_of_sequences"])] == [PREFILL] * 3
    assert [stream.spec.prompt_logprobs for stream in service.engine.streams] == [True, False, False]


async def test_prompt_tokens_are_absent_by_default(service: Service) -> None:
    reply = await generate(service, decoder_input_details=False, details=True)
    assert reply["details"]["prefill"] == []
    assert not service.engine.spec.prompt_logprobs


@pytest.mark.parametrize("path", ["/generate_stream", "/"])
async def test_a_stream_refuses_decoder_input_details(service: Service, path: str) -> None:
    # As in TGI, this error precedes all others.
    parameters = {"decoder_input_details": True, "temperature": 0}
    body = {"inputs": "hi", "parameters": parameters} | ({"stream": True} if path == "/" else {})
    [error] = events(await (await service.post(path, body)).text())
    assert error == {
        "error": "Input validation error: `decoder_input_details` == true is not supported when streaming tokens",
        "error_type": "validation",
    }
    assert not service.engine.streams
