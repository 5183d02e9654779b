"""``/v1/completions``."""

from aiohttp import web

from caravan_router.api.openai.completions.reply import AskedCompletions
from caravan_router.api.openai.completions.schema import Completion, CompletionRequest
from caravan_router.api.openai.errors import OPENAI
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.counting import counting_refusals
from caravan_router.http.server.route import GENERATION_ERRORS
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
