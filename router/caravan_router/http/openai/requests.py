"""The requests of an API key: Caravan's ``/v1/requests`` lists and aborts them, llama-server's route controls one."""

from aiohttp import web

from caravan_dialects.api.errors import UnknownRequestError
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.requests import Controlled, ControlRequest, RequestList, end_reasoning, request_list
from caravan_router.http.generation.answer import IN_PROGRESS
from caravan_router.http.server.route import BODY_ERRORS, Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import owner_of
from caravan_router.http.server.tags import Tag

ROUTES = Routes(OPENAI, tag=Tag.OPENAI)


@ROUTES.route("GET", "/v1/requests", "List the requests of the API key that are in progress", reply=RequestList)
async def requests(request: web.Request) -> web.Response:
    return json_reply(request_list(request.app[IN_PROGRESS].of(owner_of(request))))


@ROUTES.route(
    "DELETE",
    "/v1/requests/{id}",
    "Abort requests of the API key by their `X-Request-Id` and return them",
    parameters=(Parameter(name="id", place="path", description="`X-Request-Id` of the request, given or made"),),
    reply=RequestList,
    errors=(404,),
)
async def abort_request(request: web.Request) -> web.Response:
    """Clients choose ids, so several requests may have the same: all are aborted.

    A request of another key is unknown here.
    """
    request_id = request.match_info["id"]
    found = [entry for entry in request.app[IN_PROGRESS].of(owner_of(request)) if entry.request_id == request_id]
    if not found:
        raise UnknownRequestError(request_id)
    reply = json_reply(request_list(found))
    for entry in found:
        entry.abort()
    return reply


@ROUTES.route(
    "POST",
    "/v1/chat/completions/control",
    "End the reasoning of a chat completion of the API key that is in progress, as in llama-server",
    reply=Controlled,
    errors=BODY_ERRORS,
)
async def control(request: web.Request, body: ControlRequest) -> web.Response:
    return json_reply(end_reasoning(request.app[IN_PROGRESS].of(owner_of(request)), body.id))
