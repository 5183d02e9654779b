"""``/v1/requests``, a route of Caravan's own: lists and aborts the requests of an API key."""

from aiohttp import web

from caravan_dialects.api.errors import UnknownRequestError
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.requests import RequestList, request_list
from caravan_router.http.generation.answer import IN_PROGRESS
from caravan_router.http.server.route import Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import owner_of

ROUTES = Routes(OPENAI)


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
