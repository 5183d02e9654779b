"""Each dialect answers without a server: a body goes in, and bytes come out."""

import ast
import importlib
import inspect
import pkgutil
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest

from caravan_dialects import api
from caravan_dialects.api.anthropic.reply import AskedMessage
from caravan_dialects.api.anthropic.schema import MessagesRequest
from caravan_dialects.api.cloud import AskedVertex, VertexRequest
from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.gemini.reply import AskedContent, AskedList
from caravan_dialects.api.gemini.schema import GenerateContentRequest
from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.comparison import RememberedRequests
from caravan_dialects.api.generation.context import Context, ServedModel
from caravan_dialects.api.generation.run import on_all, started
from caravan_dialects.api.generation.serving import Sender
from caravan_dialects.api.limits import Limits, bounds_of
from caravan_dialects.api.llama_server.prompts import joined_prompts, split_prompt
from caravan_dialects.api.llama_server.reply import AskedLlamaServer
from caravan_dialects.api.llama_server.schema import LlamaCompletionRequest
from caravan_dialects.api.ollama.reply import AskedOllama, chat_reply
from caravan_dialects.api.ollama.schema import OllamaChatRequest
from caravan_dialects.api.ollama.validation import source_of_chat
from caravan_dialects.api.openai.chat.reply import AskedChat
from caravan_dialects.api.openai.chat.schema import ChatRequest
from caravan_dialects.api.openai.completions.reply import AskedCompletions
from caravan_dialects.api.openai.completions.schema import CompletionRequest
from caravan_dialects.api.openai.responses.reply import AskedResponse
from caravan_dialects.api.openai.responses.running import RunningResponses
from caravan_dialects.api.openai.responses.schema import ResponseRequest
from caravan_dialects.api.openai.responses.turn import begun_turn
from caravan_dialects.api.tgi.reply import AskedGenerate
from caravan_dialects.api.tgi.schema import GenerateRequest
from caravan_dialects.auth.key import NO_KEY
from caravan_dialects.chat.template_renderer import TemplateRenderer
from caravan_dialects.conversations.store import Store, StoreSettings
from caravan_dialects.media.decoder import MediaDecoder
from caravan_scheduler.core.trace import NO_TRACE
from caravan_testing.requests import CountedRequests
from caravan_testing.scripted_engine import CHAT_MODEL, ScriptedEngine

LIMITS = Limits()
CHAT = {"messages": [{"role": "user", "content": "a"}]}
Make = Callable[[Mapping[str, Any]], Asked]


def generate(fields: Mapping[str, Any]) -> Asked:
    given = {"inputs": "a", "parameters": {"max_new_tokens": 3}, **fields}
    streamed = given.pop("stream", False)
    return AskedGenerate(msgspec.convert(given, GenerateRequest), LIMITS, streamed=streamed)


def completion(fields: Mapping[str, Any]) -> Asked:
    return AskedCompletions(msgspec.convert({"prompt": "a", "max_tokens": 3, **fields}, CompletionRequest), LIMITS)


def chat(fields: Mapping[str, Any]) -> Asked:
    return AskedChat(msgspec.convert({**CHAT, "max_tokens": 3, **fields}, ChatRequest), LIMITS)


def message(fields: Mapping[str, Any]) -> Asked:
    return AskedMessage(
        msgspec.convert({**CHAT, "max_tokens": 3, "model": "m", **fields}, MessagesRequest), "id", RememberedRequests()
    )


def gemini(fields: Mapping[str, Any], kind: type[AskedContent] = AskedContent) -> Asked:
    given: dict[str, Any] = {
        "contents": {"parts": {"text": "a"}}, "generationConfig": {"maxOutputTokens": 3}, **fields
    }  # fmt: skip
    is_streamed = given.pop("stream", False)
    return kind("m", msgspec.convert(given, GenerateContentRequest), LIMITS, streamed=is_streamed)


def gemini_list(fields: Mapping[str, Any]) -> Asked:
    return gemini(fields, AskedList)


def ollama_chat(fields: Mapping[str, Any]) -> Asked:
    given = {**CHAT, "model": "m", "options": {"num_predict": 3}, "stream": False, **fields}
    body = msgspec.convert(given, OllamaChatRequest)
    return AskedOllama(body, lambda context: source_of_chat(body, context), chat_reply)


def llama(fields: Mapping[str, Any]) -> Asked:
    body = msgspec.convert({"prompt": "a", "n_predict": 3, **fields}, LlamaCompletionRequest)
    prompts = split_prompt(body.prompt, LIMITS)
    return AskedLlamaServer(body, len(prompts), 1, lambda context: joined_prompts(context, prompts))


def vertex(fields: Mapping[str, Any]) -> Asked:
    instances = [{"inputs": "a", "parameters": {"max_new_tokens": 3, **fields}}, {**CHAT, "max_tokens": 3}]
    raw = [msgspec.Raw(msgspec.json.encode(instance)) for instance in instances]
    return AskedVertex(VertexRequest(instances=raw), LIMITS)


@pytest.fixture
async def context() -> AsyncIterator[Context]:
    engine, templates, decoder = ScriptedEngine(model=CHAT_MODEL), TemplateRenderer(), MediaDecoder()
    yield Context(
        sender=Sender(key=NO_KEY, headers={}),
        limits=LIMITS,
        templates=templates,
        decoding=decoder,
        served=ServedModel(engine, CountedRequests()),
        model=CHAT_MODEL,
        adapter="",
        bounds=bounds_of(LIMITS, CHAT_MODEL),
    )
    await templates.close()
    await decoder.close()
    assert engine.all_closed


class Sent(list[bytes]):
    """The messages of a stream."""

    async def send(self, *messages: bytes) -> None:
        self += messages


async def whole(context: Context, asked: Asked) -> str:
    answer = await asked.validate(context)
    with started(context.served, answer.requests, time.monotonic(), NO_TRACE) as runs:
        return (await answer.whole(runs)).decode()


async def streamed(context: Context, asked: Asked) -> str:
    assert asked.streamed
    answer, sent = await asked.validate(context), Sent()
    with started(context.served, answer.requests, time.monotonic(), NO_TRACE) as runs:
        await on_all(runs, lambda index, run: answer.send(sent, index, run))
        last = answer.last_event(runs)
    return b"\n".join([*sent, *([] if last is None else [last])]).decode()


STREAMED = (generate, completion, chat, message, gemini, gemini_list, ollama_chat, llama)


@pytest.mark.parametrize("make", [*STREAMED, vertex])
async def test_a_whole_answer_has_the_text(context: Context, make: Make) -> None:
    assert " w1 w2 w3" in await whole(context, make({}))


@pytest.mark.parametrize("make", STREAMED)
async def test_a_streamed_answer_has_a_message_for_each_token(context: Context, make: Make) -> None:
    text = await streamed(context, make({"stream": True}))
    assert all(text.count(f'" w{number}"') == 1 for number in (1, 2, 3)), text


async def test_a_response_is_answered_and_stored(context: Context) -> None:
    store, running = Store(StoreSettings()), RunningResponses()
    await store.open()
    body = ResponseRequest(input="a", max_output_tokens=3)
    async with begun_turn(store, running, "", body, extends=True) as turn:
        asked = AskedResponse(body, turn, RememberedRequests())
        assert not asked.running.started
        assert " w1 w2 w3" in await whole(context, asked)
        assert asked.running.progress.response().status == "incomplete"
    assert await store.response("", asked.running.id)
    await store.close()


@pytest.mark.parametrize(
    ("make", "fields"),
    [
        (generate, {"parameters": {"best_of": 0}}),
        (completion, {"n": 0}),
        (chat, {"n": 0}),
        (message, {"max_tokens": 0}),
        (ollama_chat, {"options": {"num_predict": -9}}),
        (llama, {"n_predict": -9}),
        (vertex, {"best_of": 0}),
    ],
)
async def test_what_is_refused_has_no_answer(context: Context, make: Make, fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        await make(fields).validate(context)


def kinds() -> Iterator[type]:
    for module in pkgutil.walk_packages(api.__path__, f"{api.__name__}."):
        for _, kind in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(kind, Asked | Answer) and kind.__module__ == module.name:
                yield kind


def methods_of(kind: type) -> dict[str, ast.AST]:
    """Return the methods that a class of ours defines itself."""
    if kind.__module__.partition(".")[0] != "caravan_dialects":
        return {}
    [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def attributes_set_in(method: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }


@pytest.mark.parametrize("kind", list(kinds()), ids=lambda kind: kind.__name__)
def test_every_attribute_is_set_by_the_constructor(kind: type) -> None:
    known = set[str]().union(
        *(attributes_set_in(one["__init__"]) for one in map(methods_of, kind.__mro__) if "__init__" in one)
    )
    for name, method in methods_of(kind).items():
        later = attributes_set_in(method) - known
        assert not later, f"{kind.__name__}.{name} sets {later}"
