"""llama-server's own routes: the generations that the engine gets, and the replies."""

from dataclasses import replace
from typing import Any

import pytest

from caravan_dialects.api.limits import Limits
from caravan_proto.messages.results import FinishReason
from caravan_proto.messages.sampling import SAMPLERS, SamplingParams
from caravan_scheduler.core.generation import GenerationSpec
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import (
    BOS,
    EOS_TOKEN,
    FILL,
    FILL_MODEL,
    MODEL,
    Pause,
    ScriptedEngine,
    Step,
    ids_of,
    word,
)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=FILL_MODEL)


def says(*texts: str, finish: FinishReason = FinishReason.LENGTH) -> Any:
    def script(_: GenerationSpec) -> list[Step]:
        last = len(texts) - 1
        return [word(text, finish=finish if place == last else None) for place, text in enumerate(texts)]

    return script


async def complete(service: Service, **body: Any) -> Any:
    return await service.reply("/completion", {"prompt": "hi", **body})


async def test_a_whole_reply(service: Service) -> None:
    reply = await complete(service, n_predict=2, temperature=0)
    timings, settings = reply.pop("timings"), reply.pop("generation_settings")
    assert reply == {
        "index": 0,
        "content": " w1 w2",
        "tokens": [],
        "stop": True,
        "id_slot": -1,
        "tokens_predicted": 2,
        "tokens_evaluated": 3,
        "model": "scripted",
        "prompt": "<s>" + "hi",
        "has_new_line": False,
        "truncated": False,
        "stop_type": "limit",
        "stopping_word": "",
        "tokens_cached": 0,
    }
    assert (timings["cache_n"], timings["prompt_n"], timings["predicted_n"]) == (0, 3, 2)
    assert (settings["n_predict"], settings["temperature"], settings["repeat_last_n"]) == (2, 0.0, 64)


async def test_the_last_event_of_a_stream_has_what_a_whole_reply_has(service: Service) -> None:
    whole = await complete(service, n_predict=2, seed=3)
    *parts, last = await service.events("/completion", {"prompt": "hi", "n_predict": 2, "seed": 3, "stream": True})
    assert [(part["content"], part["tokens"], part["stop"]) for part in parts] == [
        (" w1", [11], False), (" w2", [12], False)
    ]  # fmt: skip
    assert all(part["tokens_evaluated"] == 3 and "prompt" not in part for part in parts)
    assert [part["tokens_predicted"] for part in parts] == [1, 2]
    assert (last.pop("content"), whole.pop("content")) == ("", " w1 w2")
    for reply in (whole, last):
        reply.pop("timings")
        reply["generation_settings"].pop("stream")
    assert last == whole


async def test_defaults_are_those_of_llama_server(service: Service) -> None:
    await complete(service)
    spec = service.engine.spec
    assert replace(spec.sampling, seed=0) == SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repeat_last_n=64, samplers=SAMPLERS
    )
    # All that fits.
    assert spec.stopping.max_new_tokens == MODEL.max_sequence_tokens - 3
    assert spec.prompt == (BOS, *ids_of("hi"))


async def test_parameters_reach_the_engine(service: Service) -> None:
    await complete(
        service,
        n_predict=5,
        temperature=-1,
        top_k=-1,
        top_p=1,
        min_p=0,
        typical_p=0.5,
        repeat_penalty=1.25,
        repeat_last_n=-1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        dry_multiplier=0.25,
        dry_base=2,
        dry_allowed_length=3,
        dry_penalty_last_n=10,
        xtc_probability=0.5,
        xtc_threshold=0.25,
        ignore_eos=True,
        logit_bias=[[5, 1.5], [6, False]],
        id_slot=3,
        t_max_prompt_ms=10,
        n_keep=-1,
        top_n_sigma=1.5,
        dynatemp_range=0.25,
        dynatemp_exponent=2,
        mirostat=0,
        adaptive_target=0.25,
        adaptive_decay=0.5,
        lora=[],
    )
    spec = service.engine.spec
    assert spec.sampling == SamplingParams(
        temperature=0.0,
        typical_p=0.5,
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        biases=((5, 1.5), (6, -100.0)),
        dry_multiplier=0.25,
        dry_base=2,
        dry_allowed_length=3,
        dry_penalty_last_n=10,
        xtc_probability=0.5,
        xtc_threshold=0.25,
        top_n_sigma=1.5,
        dynatemp_range=0.25,
        dynatemp_exponent=2,
        samplers=SAMPLERS,
        adaptive_target=0.25,
        adaptive_decay=0.5,
        seed=spec.sampling.seed,
    )
    assert (spec.stopping.max_new_tokens, spec.stopping.ignore_eos) == (5, True)


async def test_samplers_that_are_left_out_are_switched_off(service: Service) -> None:
    # llama.vim's list.
    await complete(service, samplers=["top_k", "top_p", "infill"], top_k=40, top_p=0.9, repeat_penalty=1.5, min_p=0.5)
    sampling = service.engine.spec.sampling
    order = ("top_k", "top_p", "penalties", "dry", "top_n_sigma", "typ_p", "min_p", "xtc", "temperature")
    assert replace(sampling, seed=0) == SamplingParams(top_k=40, top_p=0.9, repeat_last_n=64, samplers=order)


async def test_mirostat_has_no_other_filters_than_those_that_are_given(service: Service) -> None:
    await complete(service, mirostat=2, mirostat_tau=3, mirostat_eta=0.25, min_p=0.125)
    assert replace(service.engine.spec.sampling, seed=0) == SamplingParams(
        temperature=0.8,
        min_p=0.125,
        repeat_last_n=64,
        mirostat=2,
        mirostat_tau=3,
        mirostat_eta=0.25,
        samplers=SAMPLERS,
    )


async def test_adaptive_p_is_off_where_samplers_leave_it_out(service: Service) -> None:
    for samplers, target in ((["top_k"], None), (["adaptive-p", "top_k"], 0.25)):
        await complete(service, adaptive_target=0.25, samplers=samplers)
        assert service.engine.spec.sampling.adaptive_target == target
        assert service.engine.spec.sampling.samplers[0] == "top_k"


async def test_samplers_are_applied_in_their_order(service: Service) -> None:
    reply = await complete(service, samplers=["temp", "typical_p", "top-k"], temperature=0.5, top_n_sigma=2)
    sampling = service.engine.spec.sampling
    assert sampling.samplers[:3] == ("temperature", "typ_p", "top_k")
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.top_n_sigma) == (0.5, 40, 1.0, 0.0)
    assert reply["generation_settings"]["samplers"] == list(sampling.samplers)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"mirostat": 3}, "`mirostat` must be >= 0 and <= 2. Given: 3"),
        ({"mirostat": 1, "adaptive_target": 0.5}, "`adaptive_target` and `mirostat` cannot be used together"),
        ({"lora": [{"id": 0, "scale": 1}]}, "`lora` is not supported"),
        ({"post_sampling_probs": True}, "`post_sampling_probs` is not supported"),
        ({"samplers": ["top_k", "magic"]}, "Given: 'magic'"),
        ({"samplers": ["top_k", "top-k"]}, "`samplers` must name each sampler at most once. Given twice: 'top-k'"),
        ({"top_n_sigma": -2}, "`top_n_sigma` must be >= -1.0 and <= 100.0. Given: -2"),
        ({"dynatemp_range": -0.5}, "`dynatemp_range` must be >= 0.0 and <= 100.0. Given: -0.5"),
        ({"n_predict": -3}, "`n_predict` must be >= -1"),
        ({"n_probs": 6}, "`n_probs` must be >= 0 and <= 5. Given: 6"),
        ({"n_cmpl": 0}, "`n_cmpl` must be > 0"),
        ({"n": 0}, "`n` must be > 0"),
        ({"n": 2, "n_cmpl": 3}, "`n` and `n_cmpl` must not differ. Given: 2 and 3"),
        ({"logit_bias": [[5, True]]}, "`logit_bias[5]` is not supported"),
        ({"logit_bias": {"5": True}}, "`logit_bias[5]` is not supported"),
        ({"logit_bias": {"1000": 1}}, "logit_bias"),
        ({"logit_bias": {"-5": 1}}, "logit_bias"),
        ({"logit_bias": {"a" * 9000: 1}}, "`logit_bias` must have at most 8192 bytes. Given: 9000"),
        ({"logit_bias": {str(number): 1 for number in range(400)}}, "logit_bias"),
        ({"prompt": []}, "`prompt` cannot be empty"),
        ({"prompt": ""}, "`prompt` cannot be empty"),
        ({"prompt": [1000]}, "`prompt` token ids must be >= 0 and < 1000. Given: 1000"),
        ({"prompt": ["a"] * 500}, "Number of prompts exceeds the maximum allowed batch size of"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "`prompt.multimodal_data`"),
        ({"prompt": ["a", {"prompt_string": "a", "multimodal_data": ["aGk="]}]}, "`prompt[1].multimodal_data`"),
    ],
)
async def test_what_is_refused(service: Service, body: dict[str, Any], message: str) -> None:
    response = await service.post("/completion", {"prompt": "hi", **body})
    assert response.status == 400
    assert message in (await response.json())["error"]["message"]


_A, _B = ids_of("ab")


BIASES: list[tuple[Any, dict[int, float]]] = [
    ({"15": -2, "16": False}, {15: -2.0, 16: -100.0}),
    ({"ab": 1.5}, {_A: 1.5, _B: 1.5}),
    ([["ab", False]], {_A: -100.0, _B: -100.0}),
    # In a list of pairs, an id is a number: digits are a text there.
    ([["7", 1], [7, 2]], {ids_of("7")[0]: 1.0, 7: 2.0}),
    ([["a", 1], ["ab", 2]], {_A: 2.0, _B: 2.0}),
    ({"": 1, "5": 2}, {5: 2.0}),
    ({}, {}),
    ([], {}),
]


@pytest.mark.parametrize(("given", "expected"), BIASES)
async def test_biases_are_pairs_or_an_object(service: Service, given: Any, expected: dict[int, float]) -> None:
    await complete(service, logit_bias=given)
    assert dict(service.engine.spec.sampling.biases) == expected


async def test_no_fields_are_all_fields(service: Service) -> None:
    whole, picked = await complete(service, n_predict=2), await complete(service, n_predict=2, response_fields=[])
    assert whole.keys() == picked.keys()
    assert picked["prompt"] == whole["prompt"] != ""
    assert (await complete(service, n_predict=2, response_fields=["content"])).keys() == {"content"}


async def test_slots_tell_how_many_generations_are_in_progress() -> None:
    engine = ScriptedEngine(script=lambda _: [word("a"), Pause(), EOS_TOKEN])
    async with serving(engine, Limits(max_concurrent_requests=2)) as service:

        async def slots() -> list[bool]:
            listed = await (await service.client.get("/slots")).json()
            assert [(slot["id"], slot["n_ctx"]) for slot in listed] == [(0, 256), (1, 256)]
            return [slot["is_processing"] for slot in listed]

        async def load() -> int:
            found: int = (await (await service.client.get("/load")).json())["server_load"]
            return found

        assert (await slots(), await load()) == ([False, False], 0)
        streams = [await service.post("/completion", {"prompt": "hi", "stream": True}) for _ in range(2)]
        assert (await slots(), await load()) == ([True, True], 2)
        response = await service.client.get("/slots?fail_on_no_slot=1")
        assert (response.status, (await response.json())["error"]["code"]) == (503, "overloaded")
        engine.resume.set()
        for stream in streams:
            await stream.text()
        assert (await service.client.get("/slots?fail_on_no_slot=1")).status == 200


async def test_adapters_are_listed_and_not_scaled(service: Service) -> None:
    listed = await (await service.client.get("/lora-adapters")).json()
    assert listed == [{"id": 0, "path": "pirate", "scale": 1.0}]
    refused = await service.post("/lora-adapters", [{"id": 0, "scale": 0.5}])
    assert refused.status == 405
    for path in ("/completion", "/v1/completions"):
        refused = await service.post(path, {"prompt": "a", "lora": [{"id": 0, "scale": 0.5}]})
        assert refused.status == 400
        assert "leave it out, or name an adapter in `model`" in (await refused.json())["error"]["message"]


async def test_a_stop_string_is_named(service: Service) -> None:
    service.engine.script = says("a", "be", "nd", "x")
    reply = await complete(service, stop=["zz", "end"])
    assert (reply["content"], reply["stop_type"], reply["stopping_word"]) == ("ab", "word", "end")


async def test_an_end_token(service: Service) -> None:
    service.engine.script = lambda _: [word("a"), EOS_TOKEN]
    reply = await complete(service, return_tokens=True)
    assert (reply["content"], reply["tokens"], reply["stop_type"]) == ("a", [10, EOS_TOKEN.token_id], "eos")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_line_that_is_indented_less(service: Service, *, stream: bool) -> None:
    service.engine.script = says("a\n", "  b", "\nc", "d")
    body = {"prompt": "hi", "n_indent": 2, "stream": stream}
    replies = await service.events("/completion", body) if stream else [await service.reply("/completion", body)]
    assert "".join(reply["content"] for reply in replies) == "a\n  b\n"
    assert (replies[-1]["stop_type"], replies[-1]["has_new_line"]) == ("limit", True)
    assert service.engine.streams[0].sent == 3, "it went on"


async def test_nothing_is_generated(service: Service) -> None:
    reply = await complete(service, n_predict=0)
    assert (reply["content"], reply["tokens_predicted"], reply["stop_type"]) == ("", 0, "limit")
    assert service.engine.spec.stopping.max_new_tokens == 1


async def test_probabilities(service: Service) -> None:
    reply = await complete(service, n_predict=1, n_probs=2)
    assert reply["completion_probabilities"] == [
        {
            "id": 11,
            "token": " w1",
            "bytes": list(b" w1"),
            "logprob": -0.5,
            "top_logprobs": [
                {"id": 20, "token": " a0", "bytes": list(b" a0"), "logprob": -1.0},
                {"id": 21, "token": " a1", "bytes": list(b" a1"), "logprob": -2.0},
            ],
        }
    ]


async def test_chosen_fields(service: Service) -> None:
    fields = ["content", "timings/prompt_n", "generation_settings/n_predict", "nothing", ""]
    reply = await complete(service, n_predict=1, response_fields=fields)
    assert reply == {"content": " w1", "timings/prompt_n": 3, "generation_settings/n_predict": 1}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([5, 6], [(5, 6)]),
        ([5, "a", 6], [(5, *ids_of("a"), 6)]),
        (["a", 6], [(BOS, *ids_of("a"), 6)]),
        (["a", "b"], [(BOS, *ids_of("a")), (BOS, *ids_of("b"))]),
        (["a", {"prompt_string": "b"}, [5]], [(BOS, *ids_of("a")), (BOS, *ids_of("b")), (5,)]),
        ([["a", 5], [6], "b"], [(BOS, *ids_of("a"), 5), (6,), (BOS, *ids_of("b"))]),
    ],
)
async def test_forms_of_prompts(service: Service, prompt: Any, expected: list[tuple[int, ...]]) -> None:
    reply = await complete(service, prompt=prompt, n_predict=1)
    assert [stream.spec.prompt for stream in service.engine.streams] == expected
    assert [one["index"] for one in (reply if len(expected) > 1 else [reply])] == list(range(len(expected)))


@pytest.mark.parametrize("fields", [{"n_cmpl": 2}, {"n": 2}, {"n": 2, "n_cmpl": 2}])
async def test_several_completions_of_each_prompt(service: Service, fields: dict[str, int]) -> None:
    reply = await complete(service, prompt=["a", "b"], n_predict=1, **fields)
    assert [(one["index"], one["prompt"]) for one in reply] == [(0, "<s>a"), (1, "<s>a"), (2, "<s>b"), (3, "<s>b")]


async def test_a_prompt_is_computed_anew(service: Service) -> None:
    for _ in range(2):
        await complete(service, n_predict=1, cache_prompt=False)
    await complete(service, n_predict=1)
    assert len({stream.spec.namespace for stream in service.engine.streams}) == 3


async def test_the_plural_path(service: Service) -> None:
    assert (await service.reply("/completions", {"prompt": "hi", "n_predict": 1}))["content"] == " w1"


# What llama.vim sends.
VIM = {
    "id_slot": 0,
    "input_prefix": "ab\n",
    "input_suffix": "cd\n",
    "input_extra": [],
    "prompt": "x",
    "n_predict": 8,
    "stop": [],
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.9,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
}


async def test_infill(service: Service) -> None:
    reply = await service.reply("/infill", VIM)
    assert reply == {
        "content": " w1 w2 w3 w4 w5 w6 w7 w8",
        "timings/prompt_n": 11,
        "truncated": False,
        "tokens_cached": 0,
    }
    assert service.engine.spec.prompt == (BOS, 990, *ids_of("ab\nx"), 991, *ids_of("cd\n"), 992)


async def test_infill_that_only_computes_other_files(service: Service) -> None:
    extra = [{"text": "one", "filename": "a.py", "time": 1}, {"text": "two"}]
    body = {**VIM, "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "input_extra": extra}
    assert (await service.reply("/infill", {**body, "response_fields": [""]})) == {}
    snippet = "\n\n--- snippet ---\n\n"
    assert service.engine.spec.prompt == (BOS, *ids_of(f"{snippet}one{snippet}two"), 990, 991, 992)


async def test_files_of_a_repository_have_names(service: Service) -> None:
    service.engine.model = replace(MODEL, fill=replace(FILL, repository=993, file=994))
    body = {**VIM, "input_extra": [{"text": "one", "filename": "a.py"}]}
    await service.reply("/infill", body)
    context = (993, *ids_of("myproject\n"), 994, *ids_of("a.py\none"), 994, *ids_of("filename\n"))
    assert service.engine.spec.prompt == (BOS, *context, 990, *ids_of("ab\nx"), 991, *ids_of("cd\n"), 992)


async def test_texts_that_are_too_long_are_cut(service: Service) -> None:
    body = {**VIM, "input_prefix": "a" * 400, "input_suffix": "b" * 400, "input_extra": [{"text": "c" * 100}]}
    reply = await service.reply("/infill", body)
    assert reply["truncated"]
    room = MODEL.max_sequence_tokens - 8 - 4
    before, after = "a" * (room - room // 4 - 1) + "x", "b" * (room // 4)
    assert service.engine.spec.prompt == (BOS, 990, *ids_of(before), 991, *ids_of(after), 992)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_extra": [{"text": ""}] * 257}, "`input_extra` may have at most 256 entries. Given: 257"),
        (
            {"input_extra": [{"text": "a" * 9000}]},
            "request (9000 bytes) exceeds the available context size (256 tokens)",
        ),
        ({"input_extra": [{"filename": "a"}]}, "text"),
        ({"input_prefix": "a" * 9000}, "request (9000 bytes) exceeds the available context size (256 tokens)"),
        ({"prompt": ["a"]}, "prompt"),
    ],
)
async def test_what_infill_refuses(service: Service, change: dict[str, Any], message: str) -> None:
    response = await service.post("/infill", VIM | change)
    assert response.status == 400
    assert message in (await response.json())["error"]["message"]


async def test_a_model_without_tokens_for_it_cannot_fill_in(service: Service) -> None:
    service.engine.model = MODEL
    response = await service.post("/infill", VIM)
    assert response.status == 400
    message = (await response.json())["error"]["message"]
    assert message.endswith("scripted cannot fill in the middle of a text: its vocabulary has no tokens for that")


def prompt(before: str, after: str) -> tuple[int, ...]:
    return (BOS, FILL.prefix, *ids_of(before), FILL.suffix, *ids_of(after), FILL.middle)


@pytest.mark.parametrize("before", ["ab", ""])
async def test_a_completion_with_a_suffix(service: Service, before: str) -> None:
    await service.reply("/v1/completions", {"prompt": before, "suffix": "cd", "max_tokens": 2})
    assert service.engine.spec.prompt == prompt(before, "cd")


async def test_token_ids_before_a_suffix_are_used_as_they_are(service: Service) -> None:
    await service.reply("/v1/completions", {"prompt": [5, 6], "suffix": "c", "max_tokens": 2})
    assert service.engine.spec.prompt == (BOS, FILL.prefix, 5, 6, FILL.suffix, *ids_of("c"), FILL.middle)


async def test_each_prompt_gets_the_suffix(service: Service) -> None:
    await service.reply("/v1/completions", {"prompt": ["a", "b"], "suffix": "c", "max_tokens": 2})
    assert [stream.spec.prompt for stream in service.engine.streams] == [prompt("a", "c"), prompt("b", "c")]


async def test_control_tokens_in_the_texts_stay_text(service: Service) -> None:
    service.engine.controls = {"</s>": 2}
    await service.reply("/v1/completions", {"prompt": "a</s>", "suffix": "</s>", "max_tokens": 2})
    assert service.engine.spec.prompt == prompt("a</s>", "</s>")


@pytest.mark.parametrize("body", [{"echo": True}, {"prompt_logprobs": 1}])
async def test_a_prompt_that_is_no_text_cannot_be_shown(service: Service, body: dict[str, Any]) -> None:
    response = await service.post("/v1/completions", {"prompt": "a", "suffix": "b", **body})
    (field,) = body
    assert response.status == 400
    message = (await response.json())["error"]["message"]
    assert message.endswith(f"`{field}` may be set only when `suffix` is empty. Given: {body[field]!r}")


async def test_what_does_not_fit_is_refused(service: Service) -> None:
    response = await service.post("/v1/completions", {"prompt": "a" * 200, "suffix": "b" * 60, "max_tokens": 2})
    assert response.status == 400
    assert "266 tokens (264 in the `prompt`, 2 in the completion)" in await response.text()


@pytest.mark.parametrize("before", ["ab", ""])
async def test_ollama_inserts(service: Service, before: str) -> None:
    body = {"model": "any", "prompt": before, "suffix": "cd", "stream": False, "options": {"num_predict": 2}}
    reply = await service.reply("/api/generate", body)
    assert service.engine.spec.prompt == prompt(before, "cd")
    assert reply["response"] == " w1 w2"


@pytest.mark.parametrize(("field", "value"), [("system", "S"), ("context", [1])])
async def test_ollama_inserts_nothing_else(service: Service, field: str, value: object) -> None:
    response = await service.post("/api/generate", {"model": "any", "prompt": "a", "suffix": "b", field: value})
    assert response.status == 400
    assert f"`{field}` is not supported: leave it out, or set `suffix` to null" in await response.text()


async def test_ollama_says_that_the_model_inserts(service: Service) -> None:
    shown = await service.reply("/api/show", {"model": "any"})
    assert "insert" in shown["capabilities"]
