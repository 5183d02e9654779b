"""The routes: registered from this table, and documented from it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from caravan_router.http.cloud import routes as routes_cloud
from caravan_router.http.cloud.schema import VertexRequest, VertexResponse
from caravan_router.http.ollama import routes as routes_ollama
from caravan_router.http.ollama import schema as ollama
from caravan_router.http.openai.chat import routes as routes_chat
from caravan_router.http.openai.chat.schema import ChatCompletion, ChatCompletionChunk, ChatRequest, ChatTokens
from caravan_router.http.openai.completions import routes as routes_openai
from caravan_router.http.openai.embeddings import routes as routes_embeddings
from caravan_router.http.openai.embeddings.schema import EmbeddingList, EmbeddingRequest
from caravan_router.http.openai.schema import Completion, CompletionRequest, ModelList
from caravan_router.http.ops import routes as routes_ops
from caravan_router.http.tgi import routes as routes_generate
from caravan_router.http.tgi.schema import (
    CompatGenerateRequest,
    GenerateRequest,
    GenerateResponse,
    Info,
    StreamEvent,
    TokenizedToken,
    TokenizeRequest,
)

JSON = "application/json"
EVENTS = "text/event-stream"
LINES = "application/x-ndjson"


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """``body``: of its type, or of any of these.

    ``replies``: content type to type of a good reply (for events, of each event's data); None: no schema.
    ``errors``: statuses beyond 404, 405, 500 and, where a key is needed, 401. ``open``: no key is needed.
    ``alias``: tells the operation from another with the same handler.
    """

    method: str
    path: str
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    body: type | tuple[type, ...] = ()
    replies: tuple[tuple[str, object], ...] = ()
    errors: tuple[int, ...] = ()
    open: bool = False
    alias: str = ""

    @property
    def bodies(self) -> tuple[type, ...]:
        return self.body if isinstance(self.body, tuple) else (self.body,)

    @property
    def summary(self) -> str:
        assert self.handler.__doc__ is not None
        return self.handler.__doc__.partition("\n")[0]


_BODY_ERRORS = (400, 408, 413, 415)
_TGI_ERRORS = (*_BODY_ERRORS, 422, 424, 429, 503, 504)

ROUTES = (
    Route(
        method="POST",
        path="/generate",
        handler=routes_generate.generate,
        body=GenerateRequest,
        replies=((JSON, GenerateResponse),),
        errors=_TGI_ERRORS,
    ),
    Route(
        method="POST",
        path="/generate_stream",
        handler=routes_generate.generate_stream,
        body=GenerateRequest,
        replies=((EVENTS, StreamEvent),),
        errors=_TGI_ERRORS,
    ),
    Route(
        method="POST",
        path="/",
        handler=routes_generate.generate_compat,
        body=CompatGenerateRequest,
        replies=((JSON, list[GenerateResponse]), (EVENTS, StreamEvent)),
        errors=_TGI_ERRORS,
    ),
    Route(
        method="POST",
        path="/v1/completions",
        handler=routes_openai.completions,
        body=CompletionRequest,
        replies=((JSON, Completion), (EVENTS, Completion)),
        errors=(*_BODY_ERRORS, 424, 429, 503, 504),
    ),
    Route(
        method="POST",
        path="/v1/embeddings",
        handler=routes_embeddings.embeddings,
        body=EmbeddingRequest,
        replies=((JSON, EmbeddingList),),
        errors=(*_BODY_ERRORS, 424, 429, 503),
    ),
    Route(
        method="POST",
        path="/invocations",
        handler=routes_cloud.invocations,
        body=(CompatGenerateRequest, ChatRequest, CompletionRequest),
        replies=(
            *((JSON, kind) for kind in (list[GenerateResponse], ChatCompletion, Completion)),
            *((EVENTS, kind) for kind in (StreamEvent, ChatCompletionChunk, Completion)),
        ),
        errors=_TGI_ERRORS,
    ),
    Route(
        method="POST",
        path="/vertex",
        handler=routes_cloud.vertex,
        body=VertexRequest,
        replies=((JSON, VertexResponse),),
        errors=_TGI_ERRORS,
    ),
    Route(
        method="POST",
        path="/v1/chat/completions",
        handler=routes_chat.chat_completions,
        body=ChatRequest,
        replies=((JSON, ChatCompletion), (EVENTS, ChatCompletionChunk)),
        errors=(*_BODY_ERRORS, 424, 429, 503, 504),
    ),
    Route(
        method="POST",
        path="/chat_tokenize",
        handler=routes_chat.chat_tokenize,
        body=ChatRequest,
        replies=((JSON, ChatTokens),),
        errors=(*_BODY_ERRORS, 422, 429, 503),
    ),
    Route(
        method="POST",
        path="/api/generate",
        handler=routes_ollama.ollama_generate,
        body=ollama.OllamaGenerateRequest,
        replies=((JSON, ollama.OllamaGenerateReply), (LINES, ollama.OllamaGenerateReply)),
        errors=(*_BODY_ERRORS, 424, 429, 503, 504),
    ),
    Route(
        method="POST",
        path="/api/chat",
        handler=routes_ollama.ollama_chat,
        body=ollama.OllamaChatRequest,
        replies=((JSON, ollama.OllamaChatReply), (LINES, ollama.OllamaChatReply)),
        errors=(*_BODY_ERRORS, 424, 429, 503, 504),
    ),
    Route(
        method="GET",
        path="/api/tags",
        handler=routes_ollama.ollama_tags,
        replies=((JSON, ollama.OllamaTagList),),
        errors=(503,),
    ),
    Route(
        method="GET",
        path="/api/ps",
        handler=routes_ollama.ollama_ps,
        replies=((JSON, ollama.OllamaTagList),),
        errors=(503,),
    ),
    Route(
        method="POST",
        path="/api/show",
        handler=routes_ollama.ollama_show,
        body=ollama.OllamaShowRequest,
        replies=((JSON, ollama.OllamaShowReply),),
        errors=(*_BODY_ERRORS, 503),
    ),
    Route(
        method="GET", path="/api/version", handler=routes_ollama.ollama_version, replies=((JSON, ollama.OllamaVersion),)
    ),
    Route(
        method="POST",
        path="/tokenize",
        handler=routes_ops.tokenize,
        body=TokenizeRequest,
        replies=((JSON, list[TokenizedToken]),),
        errors=(*_BODY_ERRORS, 422, 429, 503),
    ),
    Route(method="GET", path="/v1/models", handler=routes_ops.models, replies=((JSON, ModelList),), errors=(503,)),
    Route(method="GET", path="/info", handler=routes_ops.info, replies=((JSON, Info),), errors=(503,)),
    Route(method="GET", path="/", handler=routes_ops.health, errors=(503,), open=True, alias="root"),
    Route(method="GET", path="/health", handler=routes_ops.health, errors=(503,), open=True),
    Route(method="GET", path="/ping", handler=routes_ops.health, errors=(503,), open=True, alias="ping"),
    Route(method="GET", path="/metrics", handler=routes_ops.metrics, replies=(("text/plain", str),), open=True),
    Route(method="GET", path="/openapi.json", handler=routes_ops.openapi, replies=((JSON, dict),)),
    Route(method="GET", path="/api-doc/openapi.json", handler=routes_ops.openapi, replies=((JSON, dict),), alias="tgi"),
    Route(method="GET", path="/docs", handler=routes_ops.docs, replies=(("text/html", str),)),
)
