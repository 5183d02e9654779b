"""Builds the web application: routes, middlewares and shared state. It does not listen yet."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from caravan_dialects.api.generation.comparison import RememberedRequests
from caravan_dialects.api.generation.in_progress import RequestsInProgress
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.responses.running import RunningResponses
from caravan_dialects.auth.client import PermitPools
from caravan_dialects.bulk.store import BulkSettings, BulkStore
from caravan_dialects.chat.template_renderer import TemplateRenderer
from caravan_dialects.conversations.store import Store, StoreSettings
from caravan_dialects.media.decoder import MediaDecoder
from caravan_dialects.tool_servers import NO_TOOL_SERVERS, ToolServers
from caravan_router.accounting.accounts import Accounts, AccountsSettings
from caravan_router.auth.keyring import Keyring
from caravan_router.http.bulk.running import BULK, RUNNING_BATCHES, RunningBatches
from caravan_router.http.generation.answer import IN_PROGRESS, REMEMBERED
from caravan_router.http.metrics import METRICS_ACCESS, OPEN_METRICS, MetricsAccess
from caravan_router.http.openai.background import BACKGROUND, BackgroundResponses
from caravan_router.http.ops import read_document
from caravan_router.http.page import SHOWN, page, root_routes
from caravan_router.http.routes import DIALECTS_OF_ROUTES, ROUTES, UNSUPPORTED
from caravan_router.http.server.authentication import Authentication
from caravan_router.http.server.body import BoundingBodies
from caravan_router.http.server.connection import mark_serving
from caravan_router.http.server.dialect import DIALECTS
from caravan_router.http.server.handing_over import HandingOver
from caravan_router.http.server.ignored import IGNORED, IgnoredNames, add_ignored
from caravan_router.http.server.middleware import (
    Cors,
    add_request_id,
    end_connection,
    errors_as_json,
    expected,
    identify_and_log,
)
from caravan_router.http.server.root_path import ROOT_PATH
from caravan_router.http.server.state import ENDING, RUNNING, STATE, AppState, InfoExtras, Network
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.core.catalogue import Catalogue
from caravan_scheduler.core.engine import Fleet


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """The clients that may use the API.

    ``keyring``: None if no API key is needed. ``cors_allow_origin``: origins whose pages may call the API; empty for
    any. ``page``: whether browsers get a page at `/`. ``trusted_proxies``: gateways whose headers say for whom a
    request is. ``root_path``: what a proxy puts before all paths; "" for nothing. ``metrics``: see `MetricsAccess`.
    """

    keyring: Keyring | None = None
    cors_allow_origin: Sequence[str] = ()
    page: bool = True
    trusted_proxies: Sequence[Network] = ()
    root_path: str = ""
    metrics: MetricsAccess = OPEN_METRICS


DEFAULT_INFO = InfoExtras()
OPEN_TO_ALL = Access()


def build_app(
    fleet: Fleet,
    limits: Limits,
    metrics: Metrics,
    *,
    info: InfoExtras = DEFAULT_INFO,
    access: Access = OPEN_TO_ALL,
    store: Store | None = None,
    bulk: BulkStore | None = None,
    accounts: Accounts | None = None,
    catalogue: Catalogue | None = None,
    tool_servers: ToolServers = NO_TOOL_SERVERS,
) -> web.Application:
    """Return the application, to be served by `listener.listening`. It closes ``store``, by default one in memory.

    It closes ``bulk`` and ``accounts``, too, by default such that go with it, and ``tool_servers``.
    """
    cors = Cors(access.cors_allow_origin)
    routes = (*ROUTES, *UNSUPPORTED, *root_routes(access.root_path))
    authentication = Authentication(access.keyring, routes)
    neighbours = HandingOver()
    app = web.Application(
        # `read_json` knows the limit, which depends on the models.
        client_max_size=0,
        middlewares=[
            mark_serving,
            identify_and_log,
            cors.preflight,
            errors_as_json,
            authentication.identify,
            BoundingBodies(limits.max_bodies_bytes).bound,
            neighbours.hand_over,
        ],
    )
    app[STATE] = AppState(
        fleet=fleet,
        limits=limits,
        metrics=metrics,
        permits=PermitPools(limits.max_concurrent_requests),
        info=info,
        templates=TemplateRenderer(),
        decoder=MediaDecoder(),
        store=Store(StoreSettings()) if store is None else store,
        accounts=Accounts(AccountsSettings()) if accounts is None else accounts,
        keyring=access.keyring,
        catalogue=catalogue,
        trusted_proxies=access.trusted_proxies,
        tool_servers=tool_servers,
    )
    app.on_cleanup.append(_close_parts)
    app.on_cleanup.append(lambda _app: neighbours.close())
    app[ENDING] = asyncio.Event()
    app[IN_PROGRESS] = RequestsInProgress()
    app[RUNNING] = RunningResponses()
    app[REMEMBERED] = RememberedRequests()
    app[IGNORED] = IgnoredNames()
    app[DIALECTS] = DIALECTS_OF_ROUTES
    background = app[BACKGROUND] = BackgroundResponses(app)
    app.on_startup.append(lambda _app: background.start())
    # Before the handlers of requests end: some read what it generates.
    app.on_shutdown.append(lambda _app: background.close())
    app[BULK] = BulkStore(BulkSettings()) if bulk is None else bulk
    batches = app[RUNNING_BATCHES] = RunningBatches(app, app[BULK], limits.batch_concurrency)
    app.on_startup.append(lambda _app: batches.start())
    app.on_shutdown.append(lambda _app: batches.close())
    app[SHOWN] = access.page
    app[ROOT_PATH] = access.root_path
    app[METRICS_ACCESS] = access.metrics
    read_document(access.root_path)
    page()
    for route in routes:
        # Not `add_get`, which would add HEAD: few paths have it.
        app.router.add_route(route.method, route.pattern, route.handler, expect_handler=expected)
    app.on_response_prepare.append(cors.add_headers)
    app.on_response_prepare.append(add_request_id)
    app.on_response_prepare.append(add_ignored)
    app.on_response_prepare.append(end_connection)
    return app


async def _close_parts(app: web.Application) -> None:
    await app[STATE].templates.close()
    await app[STATE].decoder.close()
    await app[STATE].tool_servers.close()
    await app[STATE].store.close()
    await app[STATE].accounts.close()
    await app[BULK].close()
