"""Ollama's routes: the generations that the engine gets, and the replies."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from caravan_dialects.api.ollama.models import human_number
from caravan_dialects.api.ollama.validation import bare_name
from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.errors import GenerationError
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import BOS, EOS, EOS_TOKEN, MODEL, ScriptedEngine, word

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if not enable_thinking %}False{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(model=replace(MODEL, chat_template=TEMPLATE, max_sequence_tokens=1024))


def text_of(engine: ScriptedEngine) -> str:
    return "".join(chr(token_id - 100) for token_id in engine.spec.prompt[1:])


async def whole(service: Service, path: str, **body: Any) -> dict[str, Any]:
    response = await service.post(path, {"model": "any", "stream": False, **body})
    assert response.status == 200, await response.text()
    assert response.content_type == "application/json"
    reply: dict[str, Any] = await response.json()
    return reply


async def lines(service: Service, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await service.post(path, {"model": "any", **body})
    assert response.status == 200, await response.text()
    assert response.content_type == "application/x-ndjson"
    text = await response.text()
    assert text.endswith("\n")
    return [msgspec.json.decode(line) for line in text.splitlines()]


async def test_a_whole_reply_of_generate(service: Service, engine: ScriptedEngine) -> None:
    reply = await whole(service, "/api/generate", prompt="hi", system="S", options={"num_predict": 2})
    assert text_of(engine) == "[system]S[user]hi"
    assert (reply["model"], reply["response"], reply["done"], reply["done_reason"]) == (
        "scripted", " w1 w2", True, "length")  # fmt: skip
    assert (reply["prompt_eval_count"], reply["eval_count"]) == (len("[system]S[user]hi") + 1, 2)
    assert reply["total_duration"] >= reply["eval_duration"] >= 0
    assert reply["created_at"].endswith("Z")


async def test_a_whole_reply_of_chat(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [word("Yes."), EOS_TOKEN]
    reply = await whole(service, "/api/chat", messages=HI)
    assert reply["message"] == {"role": "assistant", "content": "Yes."}
    assert (reply["done"], reply["done_reason"], reply["eval_count"]) == (True, "stop", 2)
    assert engine.spec.stopping.max_new_tokens == 1024 - len("[user]hi") - 1


async def test_a_stream_is_lines_of_json(service: Service) -> None:
    *parts, last = await lines(service, "/api/generate", prompt="hi", options={"num_predict": 2})
    assert [(part["response"], part["done"]) for part in parts] == [(" w1", False), (" w2", False)]
    assert (last["response"], last["done"], last["eval_count"]) == ("", True, 2)
    assert "done_reason" not in parts[0]
    *parts, last = await lines(service, "/api/chat", messages=HI, options={"num_predict": 2})
    assert [part["message"]["content"] for part in parts] == [" w1", " w2"]
    assert last["message"] == {"role": "assistant", "content": ""}


async def test_a_raw_prompt_is_not_templated(engine: ScriptedEngine) -> None:
    engine.model = MODEL
    async with serving(engine) as service:
        await whole(service, "/api/generate", prompt="as it is", raw=True)
        assert text_of(engine) == "as it is"
        assert engine.spec.prompt[0] == BOS
        response = await service.post("/api/chat", {"model": "any", "messages": HI})
        assert response.status == 400
        assert (await response.json())["error"].startswith("Template error: the model has no chat template")


async def test_a_model_without_a_template_is_prompted_as_it_is(engine: ScriptedEngine) -> None:
    engine.model, engine.script = MODEL, lambda _: [word("Yes", 50), EOS_TOKEN]
    async with serving(engine) as service:
        reply = await whole(service, "/api/generate", prompt="as it is")
        assert (text_of(engine), engine.spec.prompt[0]) == ("as it is", BOS)
        await whole(service, "/api/generate", prompt="more", system="S", context=reply["context"])
        first = len(reply["context"])
        assert list(engine.spec.prompt[:first]) == reply["context"]
        assert "".join(chr(token_id - 100) for token_id in engine.spec.prompt[first:]) == "S\n\nmore"


async def test_a_context_continues_a_conversation(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [word("Yes", 50), word(".", 51), EOS_TOKEN]
    reply = await whole(service, "/api/generate", prompt="hi")
    first = engine.spec.prompt
    assert reply["context"] == [*first, 50, 51, EOS]
    *parts, last = await lines(service, "/api/generate", prompt="more", system="S", context=reply["context"])
    assert not any("context" in part for part in parts)
    # Only the start of the prompt has a begin token.
    assert engine.spec.prompt[: len(first) + 3] == tuple(reply["context"])
    assert "".join(chr(token_id - 100) for token_id in engine.spec.prompt[len(first) + 3 :]) == "[system]S[user]more"
    assert last["context"] == [*engine.spec.prompt, 50, 51, EOS]
    assert last["prompt_eval_count"] == len(engine.spec.prompt)


async def test_a_context_without_a_begin_token_gets_one(service: Service, engine: ScriptedEngine) -> None:
    await whole(service, "/api/generate", prompt="x", context=[60, 61])
    assert engine.spec.prompt[:4] == (BOS, 60, 61, 100 + ord("["))
    await whole(service, "/api/generate", prompt="x", context=[])
    assert text_of(engine) == "[user]x"


async def test_the_begin_token_of_a_template_is_not_doubled(engine: ScriptedEngine) -> None:
    assert engine.model is not None
    engine.model = replace(engine.model, chat_template="{{ bos_token }}" + TEMPLATE)
    engine.controls = {"<s>": BOS}
    async with serving(engine) as service:
        await whole(service, "/api/generate", prompt="x", context=[BOS, 60])
        assert engine.spec.prompt[:3] == (BOS, 60, 100 + ord("["))


async def test_a_raw_reply_has_no_context(service: Service) -> None:
    assert "context" not in await whole(service, "/api/generate", prompt="hi", raw=True)
    assert "context" not in (await lines(service, "/api/generate", prompt="hi", raw=True))[-1]
    assert "context" not in await whole(service, "/api/chat", messages=HI)


@pytest.mark.parametrize(
    ("pieces", "kept"),
    [
        (["one ", "two", " stop", " here"], 2),
        (["one tw", "o sto", "p"], 1),
        (["stop"], 0),
        (["a", " stopped"], 1),
        ([b"\xc3", b"\xa9", "stop"], 2),
    ],
)
async def test_a_context_has_no_stop_string(
    service: Service, engine: ScriptedEngine, pieces: list[str | bytes], kept: int
) -> None:
    engine.script = lambda _: [word(piece, 50 + number) for number, piece in enumerate(pieces)]
    reply = await whole(service, "/api/generate", prompt="hi", options={"stop": ["stop", " stop"]})
    assert reply["context"] == [*engine.spec.prompt, *range(50, 50 + kept)]


async def test_options_reach_the_engine(service: Service, engine: ScriptedEngine) -> None:
    options = {
        "num_predict": 3, "num_ctx": 1024, "temperature": 0.5, "top_k": 5, "top_p": 0.4, "min_p": 0.1, "typical_p": 0.6,
        "seed": 9, "stop": ["zz"], "repeat_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.2,
    }  # fmt: skip
    await whole(service, "/api/generate", prompt="hi", options=options, keep_alive="5m", think=False, priority=-1)
    sampling = engine.spec.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 5, 0.4, 0.1)
    assert (sampling.typical_p, sampling.seed, sampling.repetition_penalty) == (0.6, 9, 1.2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.3, 0.2)
    assert engine.spec.stopping.max_new_tokens == 3
    assert engine.spec.priority == -1
    assert text_of(engine) == "[user]hiFalse"


async def test_defaults_are_ollamas(service: Service, engine: ScriptedEngine) -> None:
    for options in (None, {}, {"num_predict": -1, "seed": -1}, {"num_predict": -2}):
        await whole(service, "/api/chat", messages=HI, options=options)
        sampling = engine.spec.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.9)
        assert (sampling.repetition_penalty, sampling.typical_p, sampling.min_p) == (1.0, 1.0, 0.0)
        assert engine.spec.stopping.max_new_tokens == 1024 - len("[user]hi") - 1


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, None),
        ("", None),
        ("json", '{"type":"object"}'),
        ({"type": "array"}, '{"type":"array"}'),
    ],
)
async def test_format_constrains_the_output(
    service: Service, engine: ScriptedEngine, given: Any, expected: str | None
) -> None:
    await whole(service, "/api/chat", messages=HI, format=given)
    assert engine.spec.constraint == (None if expected is None else Constraint(ConstraintKind.JSON_SCHEMA, expected))


async def test_calls_are_sent_whole_with_arguments_as_an_object(service: Service, engine: ScriptedEngine) -> None:
    call = '{"name": "f", "arguments": {"a": 1}}'
    engine.script = lambda _: [*(word(letter) for letter in call), EOS_TOKEN]
    expected = [{"function": {"name": "f", "arguments": {"a": 1}}}]
    reply = await whole(service, "/api/chat", messages=HI, tools=[TOOL])
    assert reply["message"] == {"role": "assistant", "content": "", "tool_calls": expected}
    assert reply["done_reason"] == "stop"
    first, last = await lines(service, "/api/chat", messages=HI, tools=[TOOL])
    assert first["message"]["tool_calls"] == expected
    assert (first["done"], last["done"]) == (False, True)
    answered = [*HI, reply["message"], {"role": "tool", "content": "2", "tool_name": "f"}]
    await whole(service, "/api/chat", messages=answered, tools=[TOOL])
    assert text_of(engine).endswith('[assistant]{"name": "f", "arguments": {"a": 1}}[user]Result of f: 2')


async def test_a_truncated_call_is_shown_as_text(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [word('{"name": "f", "arguments": {"a"', finish=FinishReason.LENGTH)]
    reply = await whole(service, "/api/chat", messages=HI, tools=[TOOL])
    assert reply["message"] == {"role": "assistant", "content": '{"name": "f", "arguments": {"a"'}
    assert reply["done_reason"] == "length"


async def test_an_error_in_a_started_stream_is_a_line(service: Service, engine: ScriptedEngine) -> None:
    engine.script = lambda _: [word("a"), GenerationError("lost")]
    first, error = await lines(service, "/api/chat", messages=HI)
    assert first["message"]["content"] == "a"
    assert error["error"] == "Request failed during generation: lost"
    assert await service.sample('tgi_request_failure{err="generation"}') == 1


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/api/generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/api/generate", {"prompt": "x", "context": [1], "raw": True}, "context"),
        ("/api/generate", {"prompt": "x", "context": [1000]}, "`context` token ids must be >= 0 and < 1000"),
        ("/api/generate", {"prompt": "x", "context": [-1]}, "`context` token ids must be >= 0 and < 1000"),
        ("/api/generate", {"prompt": "x", "context": [5] * 1024}, "`context` must have at most 1023 tokens"),
        ("/api/generate", {"prompt": "x", "context": [5] * 1020}, "`context + prompt` must have at most 1023 tokens"),
        ("/api/generate", {"prompt": "x" * 1020}, "`prompt` must have at most 1023 tokens. Given: 1027"),
        ("/api/generate", {"prompt": "x", "images": ["aGk="]}, "images"),
        ("/api/generate", {"prompt": "x", "raw": True, "system": "s"}, "system"),
        ("/api/generate", {"prompt": "x", "think": True}, "think"),
        ("/api/generate", {"prompt": "x", "logprobs": True, "top_logprobs": 99}, "top_logprobs"),
        ("/api/generate", {"prompt": "x", "format": "xml"}, "format"),
        ("/api/generate", {"prompt": "x", "options": {"num_predict": 0}}, "options.num_predict"),
        ("/api/generate", {"prompt": "x", "options": {"mirostat": 3}}, "mirostat"),
        ("/api/generate", {"prompt": "x", "options": {"typical_p": 0}}, "options.typical_p"),
        ("/api/generate", {"prompt": "x", "options": {"temperature": -1}}, "temperature"),
        ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ],
)  # fmt: skip
async def test_a_validation_error_names_the_field(
    service: Service, engine: ScriptedEngine, path: str, body: dict[str, Any], message: str
) -> None:
    response = await service.post(path, {"model": "any", **body})
    assert response.status == 400
    assert message in (await response.json())["error"]
    assert not engine.streams


async def test_a_request_without_a_prompt_reports_the_model_as_loaded(service: Service, engine: ScriptedEngine) -> None:
    assert (await whole(service, "/api/generate", keep_alive="5m"))["done_reason"] == "load"
    assert (await whole(service, "/api/generate", prompt="", keep_alive=0))["done_reason"] == "unload"
    reply = await whole(service, "/api/chat", messages=[])
    assert (reply["message"]["content"], reply["done"], reply["done_reason"]) == ("", True, "load")
    assert not engine.streams


DETAILS = {
    "parent_model": "",
    "format": "gguf",
    "family": "llama",
    "families": ["llama"],
    "parameter_size": "134.52M",
    "quantization_level": "Q4_1",
}


def with_facts(model: ModelFacts | None) -> ModelFacts:
    assert model is not None
    return replace(
        model,
        architecture="llama",
        parameter_count=134_515_008,
        weight_bytes=96_576_768,
        quantization="Q4_1",
        modified_s=1_700_000_000,
        device_bytes=0,
        metadata=(
            ("general.architecture", "llama"),
            ("general.name", "Smol"),
            ("llama.block_count", 30),
            ("llama.context_length", 2048),
            ("tokenizer.ggml.add_bos_token", False),
        ),
    )


async def get(service: Service, path: str) -> Any:
    return await (await service.client.get(path)).json()


async def test_tags_and_ps_list_the_model_and_its_adapters(service: Service, engine: ScriptedEngine) -> None:
    engine.model = with_facts(engine.model)
    tag = {
        "name": "scripted",
        "model": "scripted",
        "modified_at": "2023-11-14T22:13:20Z",
        "size": 96_576_768,
        "digest": "f" * 16,
        "details": DETAILS,
    }
    adapter = tag | {"name": "pirate", "model": "pirate", "details": DETAILS | {"parent_model": "scripted"}}
    assert await get(service, "/api/tags") == {"models": [tag, adapter]}
    loaded = {"expires_at": "2300-01-01T00:00:00Z", "size_vram": 0, "context_length": 1024}
    running = [{key: value for key, value in one.items() if key != "modified_at"} | loaded for one in (tag, adapter)]
    assert await get(service, "/api/ps") == {"models": running}


async def test_show_describes_the_model(service: Service, engine: ScriptedEngine) -> None:
    engine.model = with_facts(engine.model)
    assert await (await service.post("/api/show", {"model": "any"})).json() == {
        "modified_at": "2023-11-14T22:13:20Z",
        "template": TEMPLATE,
        "details": DETAILS,
        "model_info": {
            "general.architecture": "llama",
            "general.name": "Smol",
            "general.parameter_count": 134_515_008,
            "llama.block_count": 30,
            "llama.context_length": 2048,
            "tokenizer.ggml.add_bos_token": False,
            "caravan.context_length": 1024,
            "caravan.vocab_size": 1000,
        },
        "capabilities": ["completion", "tools", "embedding"],
    }
    for given in ({"model": "pirate"}, {"name": "pirate", "verbose": True}):
        shown = await (await service.post("/api/show", given)).json()
        assert shown["details"] == DETAILS | {"parent_model": "scripted"}
    # VS Code wants at least 0.6.4, and compares numbers.
    version = (await get(service, "/api/version"))["version"]
    assert tuple(map(int, version.split("."))) >= (0, 6, 4)


async def test_a_model_that_only_embeds_has_no_other_capability(service: Service) -> None:
    only_embeds = replace(service.engine.model, generates=False)
    for model, capabilities in (
        (only_embeds, ["embedding"]),
        (replace(only_embeds, embedding_size=0, ranks=True), []),
    ):
        service.engine.model = model
        shown = await (await service.post("/api/show", {"model": "scripted"})).json()
        assert shown["capabilities"] == capabilities


async def test_unknown_facts_are_left_out(service: Service) -> None:
    details = {"parent_model": "", "format": "gguf"}
    tag = {"name": "scripted", "model": "scripted", "digest": "f" * 16, "details": details}
    assert (await get(service, "/api/tags"))["models"][0] == tag
    loaded = {"expires_at": "2300-01-01T00:00:00Z", "context_length": 1024}
    assert (await get(service, "/api/ps"))["models"][0] == tag | loaded
    shown = await (await service.post("/api/show", {"model": "any"})).json()
    assert "modified_at" not in shown
    assert shown["details"] == details
    assert shown["model_info"] == {
        "general.name": "scripted",
        "caravan.context_length": 1024,
        "caravan.vocab_size": 1000,
    }


@pytest.mark.parametrize(
    ("count", "text"),
    [(999, "999"), (1000, "1K"), (1_499, "1K"), (70 * 10**6, "70M"), (134_515_008, "134.52M"), (8 * 10**9, "8B"),
     (8_030_261_312, "8.0B"), (70_553_706_496, "70.6B")],
)  # fmt: skip
def test_parameter_counts_have_ollamas_format(count: int, text: str) -> None:
    assert human_number(count) == text


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("a", "a"), ("a:latest", "a"), ("owner/a:Q4_0", "owner/a:Q4_0"), ("hf.co/owner/a:Q4_0", "owner/a:Q4_0"),
        ("huggingface.co/owner/a:latest", "owner/a"), ("hf.co/a", "hf.co/a"), ("host/owner/a", "host/owner/a"),
        (None, ""),
    ],
)  # fmt: skip
def test_what_clients_add_to_a_name_is_left_out(written: str | None, meant: str) -> None:
    assert bare_name(written) == meant
