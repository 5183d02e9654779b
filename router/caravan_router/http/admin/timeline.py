"""``/admin/timeline``: what the schedulers do, as it happens."""

from aiohttp import web

from caravan_dialects.api.errors import TooManyViewersError
from caravan_dialects.api.tgi.errors import TGI
from caravan_router.http.server.endless import until_the_end
from caravan_router.http.server.event_stream import EventStream
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import STATE
from caravan_router.http.server.typed_body import Tolerance
from caravan_studio.timeline.messages import Message

ROUTES = Routes(TGI, tolerance=Tolerance.NEVER, operator=True)


@ROUTES.route(
    "GET",
    "/admin/timeline",
    "Stream what the schedulers do: steps, the queue and the use of cells, without any text",
    events=Message,
    errors=(429,),
)
async def timeline(request: web.Request) -> web.StreamResponse:
    """Raises TooManyViewersError."""
    state = request.app[STATE]
    messages = state.fleet.timeline.messages()
    if messages is None:
        raise TooManyViewersError
    async with EventStream(request, {}, state.limits) as events, until_the_end(request, messages) as told:
        async for message in told:
            await events.send(message)
    return events.response
