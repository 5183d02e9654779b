"""llama-server's ``/completion`` and ``/infill``."""

from dataclasses import replace

import msgspec
from aiohttp import web

from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.checks import check_candidates
from caravan_router.http.limits import Limits
from caravan_router.http.llama_server.prompts import infill_prompt, joined_prompts, split_prompt
from caravan_router.http.llama_server.reply import LlamaServerReply
from caravan_router.http.llama_server.schema import (
    InfillRequest,
    LlamaCompletion,
    LlamaCompletionRequest,
    LlamaServerFields,
)
from caravan_router.http.openai.errors import OPENAI
from caravan_router.http.server.body import read_body
from caravan_router.http.server.route import EVENTS, GENERATION_ERRORS, JSON, Route
from caravan_router.http.server.state import STATE

_COMPLETION = msgspec.json.Decoder(LlamaCompletionRequest)
_INFILL = msgspec.json.Decoder(InfillRequest)


async def llama_completion(request: web.Request) -> web.StreamResponse:
    """Handle ``/completion``."""
    body = await read_body(request, _COMPLETION)
    limits = request.app[STATE].limits
    prompts = split_prompt(body.prompt, limits)
    reply = LlamaServerReply(
        body, len(prompts), _completions(body, limits), lambda context: joined_prompts(context, prompts)
    )
    return await answer(request, reply)


async def infill(request: web.Request) -> web.StreamResponse:
    """Handle ``/infill``."""
    body = await read_body(request, _INFILL)
    n = _completions(body, request.app[STATE].limits)
    return await answer(request, LlamaServerReply(body, 1, n, lambda context: infill_prompt(context, body)))


def _completions(body: LlamaServerFields, limits: Limits) -> int:
    n = 1 if body.n_cmpl is None else body.n_cmpl
    check_candidates("n_cmpl", n, limits)
    return n


_REPLIES = ((JSON, LlamaCompletion | list[LlamaCompletion]), (EVENTS, LlamaCompletion))
_COMPLETIONS = Route(
    method="POST",
    path="/completion",
    handler=llama_completion,
    dialect=OPENAI,
    summary="Complete one or several prompts",
    body=(LlamaCompletionRequest,),
    replies=_REPLIES,
    errors=GENERATION_ERRORS,
)

ROUTES = (
    _COMPLETIONS,
    replace(_COMPLETIONS, path="/completions", alias="plural"),
    Route(
        method="POST",
        path="/infill",
        handler=infill,
        dialect=OPENAI,
        summary="Return the text between a prefix and a suffix",
        body=(InfillRequest,),
        replies=_REPLIES,
        errors=GENERATION_ERRORS,
    ),
)
