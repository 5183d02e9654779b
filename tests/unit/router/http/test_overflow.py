"""A prompt that does not fit the context: agents find the error by the code and the words of their dialect."""

import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from caravan_dialects.api.anthropic.errors import ANTHROPIC
from caravan_dialects.api.generation.rules import TotalTooLongError
from caravan_testing.http_server import Service, events, named_events, serving
from caravan_testing.scripted_engine import FILL, SEEING_MODEL, ScriptedEngine, count_up
from caravan_testing.seen_prompts import data_url, in_base64

TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
# Model with a context of 256 tokens, one for each character. Its template shows tools and roles.
TEMPLATE = "{% if tools %}tools{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
MODEL = replace(SEEING_MODEL, chat_template=TEMPLATE, tool_template="", fill=FILL)
# What agents and proxies look for in the sentence, whatever the provider is: the whole set of several of them, in our
# words. Each dialect has to have at least one that its own clients know.
KNOWN = (
    r"prompt is too long",
    r"exceeds? the context window",
    r"maximum context length is \d+ tokens",
    r"reduce the length of the messages",
    r"exceeds the available context size",
    r"prompt too long; exceeded (max )?context length",
    r"input length exceeds the context length",
    r"exceed context limit",
    r"`inputs` tokens \+ `max_new_tokens` must be",
    r"input token count.*exceeds the maximum",
)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def openai_picture() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url()}}


def gemini_body(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"contents": [{"parts": list(parts)}]}


def anthropic_picture() -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": in_base64()}}


@dataclass(frozen=True, kw_only=True)
class Route:
    """``body``: the request with a text; ``new``: how it limits its output. ``words``: for a prompt of N tokens.

    ``both``: the words for a prompt and its output together; "" where the output just ends at the context.
    """

    path: str
    body: Callable[[str], dict[str, Any]]
    words: str
    new: Callable[[int], dict[str, Any]] = lambda tokens: {"max_tokens": tokens}
    both: str = ""
    status: int = 400


_OPENAI = (
    "This model's maximum context length is 256 tokens. However, your {name} resulted in {{n}} tokens, and at most 255 "
    "are allowed. Please reduce the length of the {name}."
)
_OPENAI_BOTH = (
    "This model's maximum context length is 256 tokens. However, you requested {{sum}} tokens ({{n}} in the {name}, "
    "{{new}} in the completion). Please reduce the length of the {name} or completion."
)
MESSAGES: dict[str, Any] = {"words": _OPENAI.format(name="messages"), "both": _OPENAI_BOTH.format(name="messages")}
PROMPT: dict[str, Any] = {"words": _OPENAI.format(name="`prompt`"), "both": _OPENAI_BOTH.format(name="`prompt`")}
INPUT: dict[str, Any] = {"words": _OPENAI.format(name="`input`")}
CLAUDE = "prompt is too long: {n} tokens > 255 maximum"
LLAMA: dict[str, Any] = {
    "words": "request ({n} tokens) exceeds the available context size (256 tokens), try increasing it",
    "new": lambda tokens: {"n_predict": tokens},
}
_OLLAMA = "prompt too long; exceeded max context length by {{over}} tokens: `{name}` "
_NUM_PREDICT: dict[str, Any] = {"new": lambda tokens: {"options": {"num_predict": tokens}, "stream": False}}


def ollama(name: str) -> dict[str, Any]:
    return {
        "words": _OLLAMA.format(name=name) + "must have at most 255 tokens. Given: {n}",
        **_NUM_PREDICT,
    }


TGI: dict[str, Any] = {
    "words": "Input validation error: `inputs` must have at most 255 tokens, and `inputs` tokens + `max_new_tokens` "
    "must be <= 256. Given: {n}",
    "both": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 256. Given: {n} `inputs` tokens and "
    "{new} `max_new_tokens`",
    "new": lambda tokens: {"parameters": {"max_new_tokens": tokens}},
    "status": 422,
}
CLAUDE_TOOLS = [{"name": "f", "description": "d", "input_schema": {"type": "object"}}]

GEMINI_PATH = "/v1beta/models/m:generateContent"
GEMINI: dict[str, Any] = {
    "words": "The input token count ({n}) exceeds the maximum number of tokens allowed (255).",
    "new": lambda tokens: {"generationConfig": {"maxOutputTokens": tokens}},
}

ROUTES: dict[str, Route] = {
    "chat": Route(path="/v1/chat/completions", body=lambda text: {"messages": user(text)}, **MESSAGES),
    "chat with tools": Route(
        path="/v1/chat/completions", body=lambda text: {"messages": user(text), "tools": TOOLS}, **MESSAGES
    ),
    "chat with a picture": Route(
        path="/v1/chat/completions",
        body=lambda text: {"messages": user([openai_picture(), {"type": "text", "text": text}])},
        **MESSAGES,
    ),
    "completions": Route(path="/v1/completions", body=lambda text: {"prompt": text, "max_tokens": 1}, **PROMPT),
    "responses": Route(
        path="/v1/responses",
        body=lambda text: {"input": text},
        new=lambda tokens: {"max_output_tokens": tokens},
        **INPUT,
    ),
    "responses with a picture": Route(
        path="/v1/responses",
        body=lambda text: {
            "input": user([{"type": "input_image", "image_url": data_url()}, {"type": "input_text", "text": text}])
        },
        new=lambda tokens: {"max_output_tokens": tokens},
        **INPUT,
    ),
    "messages": Route(path="/v1/messages", body=lambda text: {"messages": user(text), "max_tokens": 4}, words=CLAUDE),
    "messages with tools": Route(
        path="/v1/messages",
        body=lambda text: {"messages": user(text), "max_tokens": 4, "tools": CLAUDE_TOOLS},
        words=CLAUDE,
    ),
    "messages with a picture": Route(
        path="/v1/messages",
        body=lambda text: {"messages": user([anthropic_picture(), {"type": "text", "text": text}]), "max_tokens": 4},
        words=CLAUDE,
    ),
    "gemini": Route(path=GEMINI_PATH, body=lambda text: gemini_body({"text": text}), **GEMINI),
    "gemini with functions": Route(
        path=GEMINI_PATH,
        body=lambda text: gemini_body({"text": text}) | {"tools": [{"functionDeclarations": [{"name": "f"}]}]},
        **GEMINI,
    ),
    "gemini with a picture": Route(
        path=GEMINI_PATH,
        body=lambda text: gemini_body({"inlineData": {"mimeType": "image/png", "data": in_base64()}}, {"text": text}),
        **GEMINI,
    ),
    "completion": Route(path="/completion", body=lambda text: {"prompt": text}, **LLAMA),
    "ollama chat": Route(
        path="/api/chat",
        body=lambda text: {"model": "m", "messages": user(text), "truncate": False, "stream": False},
        **ollama("messages"),
    ),
    "ollama generate": Route(
        path="/api/generate",
        body=lambda text: {"model": "m", "prompt": text, "stream": False},
        **ollama("prompt"),
    ),
    "generate": Route(path="/generate", body=lambda text: {"inputs": text}, **TGI),
}


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    async with serving(ScriptedEngine(model=MODEL, script=count_up)) as running:
        yield running
        assert running.is_idle()


def error_of(reply: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the sentence, and what else the error says."""
    if isinstance(reply["error"], str):
        return reply["error"], reply
    error = dict(reply["error"])
    return error.pop("message"), error


def shown(route: Route, prompt: int) -> dict[str, Any]:
    """Return what else the error has to say of a prompt of this many tokens."""
    kind = "invalid_request_error"
    if route.path == "/completion":
        counts = {"n_prompt_tokens": prompt, "n_ctx": 256}
        return {"code": 400, "type": "exceed_context_size_error", "param": "prompt", **counts}
    if route.path == "/v1/messages":
        return {"type": kind}
    if route.path == GEMINI_PATH:
        return {"code": 400, "status": "INVALID_ARGUMENT"}
    if route.path.startswith("/v1/"):
        name = {"/v1/responses": "input", "/v1/completions": "prompt"}.get(route.path, "messages")
        return {"code": "context_length_exceeded", "type": kind, "param": name}
    return {"error_type": "validation"}


async def tokens_around(service: Service, route: Route) -> int:
    """Return how many tokens a prompt has beside those of the text."""
    await service.reply(route.path, route.body("a") | ({} if route.path == "/v1/messages" else route.new(1)))
    return len(service.engine.spec.prompt) - 1


async def refused(service: Service, route: Route, body: dict[str, Any], prompt: int) -> str:
    before = len(service.engine.streams)
    response = await service.post(route.path, body)
    assert response.status == route.status, await response.text()
    message, rest = error_of(await response.json())
    assert shown(route, prompt).items() <= rest.items()
    assert any(re.search(known, message, re.IGNORECASE) for known in KNOWN), message
    assert len(service.engine.streams) == before
    return message


@pytest.mark.parametrize("name", ROUTES)
async def test_a_prompt_may_fill_the_context_but_for_one_token(service: Service, name: str) -> None:
    route = ROUTES[name]
    room = 255 - await tokens_around(service, route)
    await service.reply(route.path, route.body("a" * room))
    assert len(service.engine.spec.prompt) == 255
    for more in (1, 2, 1000):
        message = await refused(service, route, route.body("a" * (room + more)), 255 + more)
        if name != "completions":
            assert message == route.words.format(n=255 + more, over=more)


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if route.both])
async def test_prompt_and_output_may_fill_the_context(service: Service, name: str) -> None:
    route = ROUTES[name]
    prompt = await tokens_around(service, route) + 5
    new = 256 - prompt
    await service.reply(route.path, route.body("a" * 5) | route.new(new))
    assert service.engine.spec.stopping.max_new_tokens == new
    for text, more in (("a" * 6, 0), ("a" * 5, 1)):
        given = prompt + len(text) - 5
        message = await refused(service, route, route.body(text) | route.new(new + more), given)
        assert message == route.both.format(n=given, new=new + more, sum=257, over=1)


@pytest.mark.parametrize("name", [name for name, route in ROUTES.items() if not route.both])
async def test_output_ends_at_the_context(service: Service, name: str) -> None:
    """As at Anthropic's API, Ollama and llama-server, which refuse no number of new tokens."""
    route = ROUTES[name]
    prompt = await tokens_around(service, route) + 5
    for new in (256 - prompt, 257 - prompt, 99999):
        await service.reply(route.path, route.body("a" * 5) | route.new(new))
        assert service.engine.spec.stopping.max_new_tokens == 256 - prompt
    message = await refused(service, route, route.body("a" * 256) | route.new(99999), prompt + 251)
    assert message == route.words.format(n=prompt + 251, over=prompt - 4)


@pytest.mark.parametrize("name", ROUTES)
async def test_a_prompt_that_is_too_long_to_be_counted(service: Service, name: str) -> None:
    route = ROUTES[name]
    response = await service.post(route.path, route.body("a" * 9000))
    assert response.status == route.status
    message, rest = error_of(await response.json())
    expected = shown(route, 0)
    expected.pop("n_prompt_tokens", None)
    assert expected.items() <= rest.items()
    assert "n_prompt_tokens" not in rest
    if route.path != "/generate":
        assert any(re.search(known, message) for known in KNOWN), message
    assert re.search(r"90\d\d bytes|bytes. Given: 90\d\d", message), message
    assert "8192" in message or route.path == "/completion", message


@pytest.mark.parametrize("name", [name for name in ROUTES if not name.startswith("responses")])
async def test_a_stream_is_refused_before_it_starts(service: Service, name: str) -> None:
    route = ROUTES[name]
    if route.path == "/generate":
        response = await service.post("/generate_stream", route.body("a" * 300))
        assert response.status == 200, "as in TGI, the error of a stream is an event"
        [error] = events(await response.text())
        assert error["error"].startswith("Input validation error: `inputs` must have at most 255 tokens")
    else:
        asked = {} if route.path == GEMINI_PATH else {"stream": True}
        path = route.path.replace(":generate", ":streamGenerate")
        response = await service.post(path, route.body("a" * 300) | asked)
        assert response.status == route.status
        assert response.content_type == "application/json"


async def test_a_streamed_response_says_it_in_an_event(service: Service) -> None:
    response = await service.post("/v1/responses", {"input": "a" * 300, "stream": True})
    failed = named_events(await response.text())[-1]["response"]["error"]
    assert failed["code"] == "context_length_exceeded"
    assert failed["message"].startswith("This model's maximum context length is 256 tokens. However, your `input`")


async def test_a_turn_of_a_conversation(service: Service) -> None:
    created = await service.reply("/v1/conversations", {"items": [{"role": "user", "content": "a" * 200}]})
    body = {"input": "b" * 100, "conversation": created["id"]}
    response = await service.post("/v1/responses", body)
    error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
    assert "maximum context length is 256 tokens" in error["message"]
    # The turn is not in the conversation: a shorter one is answered.
    assert (await service.reply("/v1/responses", body | {"input": "b"}))["status"] == "incomplete"


async def test_a_medium_that_does_not_fit(service: Service) -> None:
    pictures = [openai_picture() for _ in range(8)]
    body = {"messages": user([{"type": "text", "text": "a" * 220}, *pictures])}
    response = await service.post("/v1/chat/completions", body)
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "context_length_exceeded")
    assert "resulted in 258 tokens, and at most 255 are allowed" in error["message"]


VECTORS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/embeddings", {"input": "a" * 64}, "`input` resulted in 65 tokens, and at most 64 are allowed", "input"),
    ("/v1/embeddings", {"input": [5] * 65}, "`input` resulted in 65 tokens", "input"),
    ("/v1/embeddings", {"input": ["a", "a" * 64]}, "`input[1]` resulted in 65 tokens", "input[1]"),
    ("/v1/embeddings", {"input": ["a", "é" * 5001]}, "`input[1]` resulted in 10002 bytes", "input[1]"),
    ("/v1/score", {"text_1": "a", "text_2": ["a", "a" * 64]}, "`text_2[1]` resulted in 65 tokens", "text_2[1]"),
    ("/v1/rerank", {"query": "a", "documents": ["a" * 64]}, "`documents` resulted in 65 tokens", "documents"),
]


@pytest.mark.parametrize(("path", "body", "words", "param"), VECTORS)
async def test_a_text_to_embed(service: Service, path: str, body: dict[str, Any], words: str, param: str) -> None:
    response = await service.post(path, body)
    error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "context_length_exceeded", param)
    assert words in error["message"]
    assert re.match(r"This model's maximum context length is \d+ tokens\. However, your ", error["message"])


OLLAMA_VECTORS = [
    ("/api/embed", {"input": "a" * 64, "truncate": False}, "`input` must have at most 64 tokens. Given: 65"),
    ("/api/embed", {"input": ["a", "a" * 64], "truncate": False}, "`input[1]` must have at most 64 tokens. Given: 65"),
    ("/api/embeddings", {"prompt": "a" * 64, "truncate": False}, "`prompt` must have at most 64 tokens. Given: 65"),
    (
        "/api/embeddings",
        {"prompt": "abc", "truncate": False, "options": {"num_ctx": 2}},
        "`prompt` must have at most 2 tokens. Given: 4",
    ),
]


@pytest.mark.parametrize(("path", "body", "words"), OLLAMA_VECTORS)
async def test_a_text_that_ollama_embeds(service: Service, path: str, body: dict[str, Any], words: str) -> None:
    response = await service.post(path, {"model": "any", **body})
    assert response.status == 400
    assert (await response.json())["error"] == f"the input length exceeds the context length: {words}"


@pytest.mark.parametrize("name", ROUTES)
async def test_a_text_that_no_shard_tokenizes(name: str) -> None:
    """The shards of a model may have other limits than the one that told its facts."""
    route = ROUTES[name]
    engine = ScriptedEngine(model=MODEL, script=count_up)
    async with serving(engine) as service:
        engine.longest_text = 100
        response = await service.post(route.path, route.body("a" * 200))
        assert response.status == route.status
        message, _ = error_of(await response.json())
        assert any(re.search(known, message) for known in KNOWN), message


def test_anthropics_words_for_prompt_and_output() -> None:
    body = ANTHROPIC.body(TotalTooLongError("messages", "max_tokens", 256, 200, 57), "r").decode()
    assert "input length and `max_tokens` exceed context limit: 200 + 57 > 256, decrease input length or" in body
