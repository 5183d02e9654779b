"""Several choices per prompt: ``n``, ``best_of`` and parameters for each choice."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from caravan_dialects.api.generation.checks import choice_seed
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import Service, events
from caravan_testing.scripted_engine import CHAT_MODEL, Step, word

MESSAGES = [{"role": "user", "content": "x"}]
THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think> </think> #}"


def one_by_one(service: Service, *texts: tuple[str, float]) -> Callable[[GenerationSpec], list[Step]]:
    """Return a script in which each candidate outputs the next of ``texts``: two tokens with the given mean logprob."""

    def script(_: GenerationSpec) -> list[Step]:
        text, mean = texts[len(service.engine.streams) % len(texts)]
        return [
            word(text, logprob=mean - 0.5),
            word("!", finish=FinishReason.LENGTH, logprob=mean + 0.5),
        ]

    return script


async def complete(service: Service, **body: Any) -> dict[str, Any]:
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
    reply = await complete(service, prompt="x", n=2, best_of=4)
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
    reply = await complete(service, prompt=["x", "y"], best_of=2, logprobs=0)
    assert [(choice["index"], choice["text"]) for choice in reply["choices"]] == [(0, "b!"), (1, "c!")]
    assert reply["choices"][0]["logprobs"]["token_logprobs"] == [-1.5, -0.5]


async def test_the_rank_does_not_depend_on_length(service: Service) -> None:
    def script(_: GenerationSpec) -> list[Step]:
        if not service.engine.streams:
            return [word("short", finish=FinishReason.LENGTH, logprob=-1.0)]
        return [word("long", logprob=-0.9), word("er", finish=FinishReason.LENGTH, logprob=-0.9)]

    service.engine.script = script
    [choice] = (await complete(service, prompt="x", best_of=2))["choices"]
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
    await complete(service, prompt="x", n=3, seed=7, max_tokens=1)
    seeds = [stream.spec.sampling.seed for stream in service.engine.streams]
    assert seeds == [7, choice_seed(7, 1), choice_seed(7, 2)]


async def test_greedy_choices_have_no_seed(service: Service) -> None:
    await complete(service, prompt="x", n=2, seed=7, temperature=0, max_tokens=1)
    assert [stream.spec.sampling.seed for stream in service.engine.streams] == [0, 0]


async def test_choice_parameters_override_the_request(service: Service) -> None:
    choices = [
        {},
        {"temperature": 0.5, "top_k": 5, "seed": -2},
        {"temperature": 0, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5, "seed": None},
        {"frequency_penalty": 1, "presence_penalty": -1},
    ]
    await complete(service, prompt="x", n=4, choice_parameters=choices, temperature=0.75, top_k=9, seed=3, max_tokens=1)
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
    await complete(service, prompt=["x", "y"], best_of=3, choice_parameters=choices, logprobs=0, max_tokens=1)
    assert [stream.spec.sampling.top_k for stream in service.engine.streams] == [1, 2, 3] * 2


async def test_cached_tokens_count_the_first_choice_of_each_prompt(service: Service) -> None:
    def cached(spec: GenerationSpec) -> int:
        position = [id(stream.spec) for stream in service.engine.streams].index(id(spec))
        return 100 if position % 2 else 1

    service.engine.cached_tokens = cached
    reply = await complete(service, prompt=["x", "y"], n=2, max_tokens=1)
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
