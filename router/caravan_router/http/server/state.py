"""State that handlers share, kept in the application or in the request."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network

from aiohttp import web

from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.responses.running import RunningResponses
from caravan_dialects.auth.client import Client, PermitPools
from caravan_dialects.chat.template_renderer import TemplateRenderer
from caravan_dialects.conversations.store import Store
from caravan_dialects.media.decoder import MediaDecoder
from caravan_dialects.tool_servers import NO_TOOL_SERVERS, ToolServers
from caravan_router.accounting.accounts import Accounts
from caravan_router.auth.keyring import Keyring
from caravan_router.metrics.recorder import Metrics
from caravan_scheduler.core.catalogue import Catalogue
from caravan_scheduler.core.engine import Fleet
from caravan_scheduler.core.trace import RequestTrace, Tracing

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoExtras:
    """Facts for /info and the response headers beyond limits and model. None: the fact does not apply."""

    version: str = "0"
    waiting_served_ratio: float | None = None
    max_waiting_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_size: int | None = None
    compute_type: str = "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """The parts that handlers share.

    ``keyring``: None if no API key is needed. ``catalogue``: None if no model is loaded and unloaded here.
    ``trusted_proxies``: gateways whose headers say for whom a request is.
    ``started_s``: when the server started, in seconds since 1970; what has no time of its own is as old.
    """

    fleet: Fleet
    limits: Limits
    metrics: Metrics
    permits: PermitPools
    info: InfoExtras
    templates: TemplateRenderer
    decoder: MediaDecoder
    store: Store
    accounts: Accounts
    keyring: Keyring | None
    catalogue: Catalogue | None = None
    trusted_proxies: Sequence[Network] = ()
    tool_servers: ToolServers = NO_TOOL_SERVERS
    started_s: int = field(default_factory=lambda: int(time.time()))


STATE = web.AppKey("state", AppState)

# The responses that are generated, for others to read, cancel and fork.
RUNNING = web.AppKey("running", RunningResponses)

# Set when the server ends: replies then end their connections.
ENDING = web.AppKey("ending", asyncio.Event)

# The client of a request. Absent on open routes when API keys are in use.
CLIENT = web.RequestKey("client", Client)

# Absent if no request is traced.
TRACING = web.AppKey[Tracing]("tracing")

TRACE = web.RequestKey[RequestTrace]("trace")

# The model that the request's body names, once it was read.
NAMED_MODEL = web.RequestKey("named_model", str)

# When the request's head had arrived, in seconds on time.monotonic.
ARRIVED = web.RequestKey("arrived", float)


def owner_of(request: web.Request) -> str:
    """Return the name of the request's API key. Requests, responses and conversations are shown to their owner only."""
    return request[CLIENT].key.tenant.name
