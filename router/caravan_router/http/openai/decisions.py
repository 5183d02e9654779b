"""``/v1/decisions``: many questions about one input."""

from aiohttp import web

from caravan_dialects.api.openai.decisions.reply import AskedDecision
from caravan_dialects.api.openai.decisions.schema import Decision, DecisionRequest
from caravan_dialects.api.openai.errors import OPENAI
from caravan_router.http.generation.answer import answer
from caravan_router.http.generation.counting import counting_refusals
from caravan_router.http.server.route import GENERATION_ERRORS
from caravan_router.http.server.routes import Routes

ROUTES = Routes(OPENAI)


@ROUTES.route(
    "POST",
    "/v1/decisions",
    "Answer typed questions about an input with probabilities",
    around=counting_refusals,
    reply=Decision,
    errors=GENERATION_ERRORS,
)
async def decisions(request: web.Request, body: DecisionRequest) -> web.StreamResponse:
    return await answer(request, AskedDecision(body))
