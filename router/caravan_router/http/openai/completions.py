"""``/v1/completions``, and the tokens of its prompts."""

from aiohttp import web

from caravan_dialects.api.generation.rendered import RenderedTokens, rendered_tokens
from caravan_dialects.api.openai.completions.reply import AskedCompletions
from caravan_dialects.api.openai.completions.schema import Completion, CompletionRequest
from caravan_dialects.api.openai.completions.validation import completion_plan_of, validate_completion
from caravan_dialects.api.openai.errors import OPENAI
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.models import asked_model, context_of, counting_refusals, reading_texts
from caravan_router.http.server.route import BODY_ERRORS, GENERATION_ERRORS, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE

ROUTES = Routes(OPENAI)


@ROUTES.route(
    "POST",
    "/v1/completions",
    "Complete one or several prompts",
    around=counting_refusals,
    reply=Completion,
    events=Completion,
    errors=GENERATION_ERRORS,
)
async def completions(request: web.Request, body: CompletionRequest) -> web.StreamResponse:
    return await answer(request, AskedCompletions(body, request.app[STATE].limits))


@ROUTES.route(
    "POST",
    "/v1/completions/render",
    "Return the tokens of each prompt, as in vLLM",
    around=reading_texts,
    reply=list[RenderedTokens],
    errors=(*BODY_ERRORS, 404, 429, 503),
)
async def render_completion(request: web.Request, body: CompletionRequest) -> web.Response:
    context = await context_of(request, asked_model(request, body.model))
    valid = await validate_completion(context, body, completion_plan_of(body, context.limits))
    return json_reply([rendered_tokens(context.model.name, one.prompt) for one in valid])
