"""Fields of vLLM and llama-server that both generating routes under /v1 accept."""

import json
from typing import Any

import pytest

from caravan_proto.messages.constraint import Constraint
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import events, serving
from caravan_testing.scripted_engine import BOS, CHAT_MODEL, EOS, EOS_TOKEN, Pause, ScriptedEngine, Step, word

COMPLETIONS: tuple[str, dict[str, Any]] = ("/v1/completions", {"prompt": "hi"})
CHAT: tuple[str, dict[str, Any]] = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
BOTH = pytest.mark.parametrize("route", [COMPLETIONS, CHAT], ids=["completions", "chat"])
Route = tuple[str, dict[str, Any]]


async def ask(route: Route, *steps: Step, **fields: Any) -> Any:
    def script(_: GenerationSpec) -> list[Step]:
        return list(steps)

    async with serving(ScriptedEngine(script=script, model=CHAT_MODEL)) as service:
        response = await service.post(route[0], route[1] | fields)
        assert response.status == 200, await response.text()
        return events(await response.text()) if fields.get("stream") else await response.json()


def text_of(reply: Any) -> str:
    choice = reply["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@BOTH
async def test_a_stop_string_is_kept_on_request(route: Route) -> None:
    steps = (word("a"), word("b"), word("c"), EOS_TOKEN)
    assert text_of(await ask(route, *steps, stop=["b"])) == "a"
    assert text_of(await ask(route, *steps, stop=["b"], include_stop_str_in_output=True)) == "ab"


@BOTH
async def test_special_tokens_are_shown_on_request(route: Route) -> None:
    steps = (word("a"), word("<tool>", special=True), word("b"), EOS_TOKEN)
    assert text_of(await ask(route, *steps)) == "ab"
    assert text_of(await ask(route, *steps, skip_special_tokens=False)).startswith("a<tool>b")


@BOTH
async def test_stop_strings_do_not_match_before_min_tokens(route: Route) -> None:
    steps = (word("b"), word("a"), word("b"), word("c"), EOS_TOKEN)
    assert text_of(await ask(route, *steps, stop=["b"])) == ""
    assert text_of(await ask(route, *steps, stop=["b"], min_tokens=2)) == "ba"


@BOTH
async def test_n_cmpl_means_n(route: Route) -> None:
    reply = await ask(route, word("a"), EOS_TOKEN, n_cmpl=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    reply = await ask(route, word("a"), EOS_TOKEN, n_cmpl=2, n=2)
    assert len(reply["choices"]) == 2


PROMPT = [BOS, 100 + ord("h"), 100 + ord("i")]


async def test_completions_return_token_ids() -> None:
    steps = (word("a", 11), word("b", 12), EOS_TOKEN)
    reply = await ask(COMPLETIONS, *steps, return_token_ids=True, n=2)
    for choice in reply["choices"]:
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["token_ids"] == [11, 12, EOS]
    assert "token_ids" not in (await ask(COMPLETIONS, *steps))["choices"][0]


async def test_streamed_completions_return_token_ids_with_their_text() -> None:
    steps = (word("a", 11), word(b"\xc3", 12), word(b"\xa9", 13), EOS_TOKEN)
    *chunks, done = await ask(COMPLETIONS, *steps, return_token_ids=True, stream=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert done == "[DONE]"
    assert [choice.get("prompt_token_ids") for choice in choices] == [PROMPT, None, None, None]
    assert [(choice["text"], choice["token_ids"]) for choice in choices] == [
        ("a", [11]),
        ("", [12]),
        ("é", [13]),
        ("", [EOS]),
    ]


async def test_chat_returns_token_ids() -> None:
    reply = await ask(CHAT, word("a", 11), EOS_TOKEN, return_token_ids=True)
    assert reply["prompt_token_ids"]
    assert reply["choices"][0]["token_ids"] == [11, EOS]
    *chunks, _ = await ask(CHAT, word("a", 11), EOS_TOKEN, return_token_ids=True, stream=True)
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [reply["prompt_token_ids"], None]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[11], [EOS]]


async def test_chat_accepts_the_whole_prompt_as_token_ids() -> None:
    reply = await ask(CHAT, word("a"), EOS_TOKEN, messages=[], prompt_token_ids=PROMPT, return_token_ids=True)
    assert reply["prompt_token_ids"] == PROMPT
    assert reply["usage"]["prompt_tokens"] == 3


SAMPLING = {
    "typical_p": 0.9, "repeat_last_n": 32, "dry_multiplier": 0.8, "dry_base": 1.5, "dry_allowed_length": 3,
    "dry_penalty_last_n": -1, "xtc_probability": 0.5, "xtc_threshold": 0.2, "top_n_sigma": 1.5,
    "dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.25,
}  # fmt: skip


@BOTH
async def test_sampling_and_stopping_fields_reach_the_engine(route: Route) -> None:
    async with serving(ScriptedEngine(model=CHAT_MODEL)) as service:
        fields = {**SAMPLING, "stop_token_ids": [7, 8], "min_tokens": 2, "max_tokens": 3}
        response = await service.post(route[0], route[1] | fields)
        assert response.status == 200, await response.text()
        sampling, stopping = service.engine.spec.sampling, service.engine.spec.stopping
    got = {name: getattr(sampling, name) for name in SAMPLING}
    assert got == SAMPLING | {"dry_penalty_last_n": None}
    assert (stopping.stop_token_ids, stopping.min_tokens) == (frozenset({7, 8}), 2)


async def test_each_choice_may_have_its_own_sampling() -> None:
    async with serving(ScriptedEngine(model=CHAT_MODEL)) as service:
        choices = [{}, {"xtc_probability": 0.1, "top_n_sigma": 1, "samplers": ["top_n_sigma", "xtc"]}]
        body = {"prompt": "hi", "n": 2, "xtc_probability": 0.4, "top_k": 7, "choice_parameters": choices}
        assert (await service.post("/v1/completions", body)).status == 200
        samplings = [stream.spec.sampling for stream in service.engine.streams]
        assert [sampling.xtc_probability for sampling in samplings] == [0.4, 0.1]
        assert [sampling.top_n_sigma for sampling in samplings] == [0, 1]
        # What is left out of `samplers` is off.
        assert [sampling.top_k for sampling in samplings] == [7, 0]
        assert [sampling.samplers[:2] for sampling in samplings] == [(), ("top_n_sigma", "xtc")]


@BOTH
async def test_a_range_of_temperatures_needs_a_seed_even_around_zero(route: Route) -> None:
    async with serving(ScriptedEngine(model=CHAT_MODEL)) as service:
        fields = {"temperature": 0, "dynatemp_range": 0.5, "seed": 5}
        assert (await service.post(route[0], route[1] | fields)).status == 200
        assert service.engine.spec.sampling.seed == 5


@BOTH
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("repeat_last_n", -2),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", -1),
        ("dry_penalty_last_n", -2),
        ("xtc_probability", 1.5),
        ("xtc_threshold", -0.1),
        ("typical_p", 0),
        ("top_n_sigma", 101),
        ("dynatemp_range", -1),
        ("dynatemp_exponent", -1),
        ("samplers", ["top_k", "best"]),
        ("samplers", ["top_k", "top_k"]),
        ("mirostat", 3),
        ("mirostat_tau", -1),
        ("mirostat_eta", 101),
        ("adaptive_target", 1.5),
        ("adaptive_decay", 1),
        ("stop_token_ids", [1000]),
    ],
)
async def test_the_error_for_a_value_out_of_range_names_the_field(route: Route, field: str, value: object) -> None:
    async with serving(ScriptedEngine(model=CHAT_MODEL)) as service:
        response = await service.post(route[0], route[1] | {field: value})
        assert response.status == 400
        assert (await response.json())["error"]["param"] == field


async def test_a_stop_token_has_the_finish_reason_stop() -> None:
    end = word("!", 7, finish=FinishReason.STOP_TOKEN)
    reply = await ask(COMPLETIONS, word("a"), end, stop_token_ids=[7])
    assert (text_of(reply), reply["choices"][0]["finish_reason"]) == ("a!", "stop")


async def test_tgi_accepts_min_new_tokens() -> None:
    async with serving(ScriptedEngine(model=CHAT_MODEL)) as service:
        parameters = {"min_new_tokens": 2, "max_new_tokens": 3}
        assert (await service.post("/generate", {"inputs": "hi", "parameters": parameters})).status == 200
        assert service.engine.spec.stopping.min_tokens == 2
        parameters = {"min_new_tokens": 4, "max_new_tokens": 3}
        response = await service.post("/generate", {"inputs": "hi", "parameters": parameters})
        assert response.status == 422
        assert "`min_new_tokens`" in (await response.json())["error"]


async def test_ollama_accepts_repeat_last_n_and_mirostat() -> None:
    async with serving(ScriptedEngine(model=CHAT_MODEL)) as service:
        body = {"model": "m", "prompt": "hi", "stream": False}
        assert (
            await service.post("/api/generate", body | {"options": {"repeat_last_n": 64, "mirostat": 0}})
        ).status == 200
        sampling = service.engine.spec.sampling
        assert (sampling.repeat_last_n, sampling.top_k, sampling.top_p) == (64, 40, 0.9)
        options = {"mirostat": 1, "mirostat_tau": 3, "mirostat_eta": 0.5, "top_p": 0.75}
        assert (await service.post("/api/generate", body | {"options": options})).status == 200
        sampling = service.engine.spec.sampling
        assert (sampling.mirostat, sampling.mirostat_tau, sampling.mirostat_eta) == (1, 3, 0.5)
        # Mirostat replaces the default filters.
        assert (sampling.top_k, sampling.top_p) == (0, 0.75)
        response = await service.post("/api/generate", body | {"options": {"mirostat": 3}})
        assert response.status == 400
        assert "mirostat" in (await response.json())["error"]


@BOTH
async def test_min_tokens_may_not_exceed_the_new_tokens(route: Route) -> None:
    async with serving(ScriptedEngine(model=CHAT_MODEL)) as service:
        response = await service.post(route[0], route[1] | {"max_tokens": 4, "min_tokens": 5})
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "min_tokens"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "min_tokens": 5, "guided_regex": "a"}),
        (CHAT[0], CHAT[1] | {"max_tokens": 4, "min_tokens": 5, "guided_regex": "a"}),
        (
            "/generate",
            {
                "inputs": "hi",
                "parameters": {
                    "max_new_tokens": 4,
                    "min_new_tokens": 5,
                    "grammar": {"type": "regex", "value": "a"},
                },
            },
        ),
    ],
)
async def test_every_field_is_checked_before_a_constraint_is_compiled(path: str, body: dict[str, Any]) -> None:
    compiled: list[Constraint] = []

    def note(constraint: Constraint) -> None:
        compiled.append(constraint)

    async with serving(ScriptedEngine(model=CHAT_MODEL, problem=note)) as service:
        assert (await service.post(path, body)).status in {400, 422}
    assert not compiled


USAGE = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}


@BOTH
async def test_each_chunk_may_have_the_usage_so_far(route: Route) -> None:
    steps = (word("a"), word("b"), EOS_TOKEN)
    *chunks, total, done = await ask(route, *steps, stream=True, stream_options=USAGE)
    counts = [(chunk["usage"]["completion_tokens"], chunk["usage"]["total_tokens"]) for chunk in (*chunks, total)]
    prompt = total["usage"]["prompt_tokens"]
    assert (counts, done) == ([(1, prompt + 1), (2, prompt + 2), (3, prompt + 3), (3, prompt + 3)], "[DONE]")
    # vLLM sends none of it without the other field.
    first, *_ = await ask(route, *steps, stream=True, stream_options={"continuous_usage_stats": True})
    assert "usage" not in first


@BOTH
async def test_each_chunk_may_have_the_times_so_far(route: Route) -> None:
    steps = (word("a"), word("b"), EOS_TOKEN)
    *chunks, _ = await ask(route, *steps, stream=True, timings_per_token=True)
    assert [chunk["timings"]["predicted_n"] for chunk in chunks] == [1, 2, 3]
    assert chunks[0]["timings"]["cache_n"] + chunks[0]["timings"]["prompt_n"] > 0
    assert (await ask(route, *steps, timings_per_token=True))["timings"]["predicted_n"] == 3
    assert "timings" not in await ask(route, *steps)


LLAMA: Route = ("/completion", {"prompt": "hi", "n_predict": 3})


@pytest.mark.parametrize("route", [CHAT, LLAMA], ids=["chat", "llama-server"])
async def test_a_stream_may_tell_how_far_its_prompt_is(route: Route) -> None:
    engine = ScriptedEngine(
        script=lambda _: [Pause(), word("a"), EOS_TOKEN],
        model=CHAT_MODEL,
        prompt_computed=2,
        cached_tokens=lambda _: 1,
    )
    async with serving(engine) as service:
        body = route[1] | {"stream": True, "return_progress": True, "timings_per_token": True}
        async with service.client.post(route[0], json=body) as response:
            line = await response.content.readline()
            await response.content.readline()
            first = json.loads(line.removeprefix(b"data: "))
            line = await response.content.readline()
            second = json.loads(line.removeprefix(b"data: "))
            engine.resume.set()
            third, *rest = events((await response.text()).removeprefix("\n"))
    total = len(engine.streams[0].spec.prompt)
    shown = [event["prompt_progress"] for event in (first, second, third)]
    assert [(one["total"], one["cache"]) for one in shown] == [(total, 1)] * 3
    # The first has what was in the cache. When there is a token, all of the prompt is computed.
    assert [one["processed"] for one in shown] == [1, 2, total]
    assert all(one["time_ms"] >= 0 for one in shown)
    timings = [event["timings"] for event in (first, second, third)]
    assert [(one["cache_n"], one["prompt_n"], one["predicted_n"]) for one in timings] == [
        (1, 0, 0), (1, 1, 0), (1, total - 1, 0)
    ]  # fmt: skip
    assert not any("prompt_progress" in event for event in rest if event != "[DONE]")
    assert len(rest) >= 2
