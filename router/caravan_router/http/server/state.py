"""What every handler needs."""

from dataclasses import dataclass

from aiohttp import web

from caravan_router.auth.client import Client
from caravan_router.auth.permits import PermitPool
from caravan_router.chat.template_renderer import TemplateRenderer
from caravan_router.core.engine import Engine
from caravan_router.http.limits import Limits
from caravan_router.metrics.recorder import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class InfoExtras:
    """What /info and the response headers say of the router beyond limits and model; None where it has no meaning."""

    version: str = "0"
    waiting_served_ratio: float | None = None
    max_waiting_tokens: int | None = None
    max_batch_prefill_tokens: int | None = None
    max_batch_size: int | None = None
    compute_type: str = "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    engine: Engine
    limits: Limits
    metrics: Metrics
    permits: PermitPool
    info: InfoExtras
    templates: TemplateRenderer


STATE = web.AppKey("state", AppState)

# Who asks; of requests for routes that need a key where there are keys, and of all where there are none.
CLIENT = web.RequestKey("client", Client)
