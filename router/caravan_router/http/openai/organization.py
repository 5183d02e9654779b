"""OpenAI's routes of usage: an operator's key reads that of all keys, any other key its own."""

import time
from collections.abc import Callable

from aiohttp import web

from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.organization import (
    CompletionsUsage,
    EmbeddingsUsage,
    Result,
    UsagePage,
    UsageQuery,
    completions_usage,
    embeddings_usage,
    usage_page,
    usage_query,
)
from caravan_dialects.auth.usage import Account, Counts, Kind
from caravan_router.http.server.route import Parameter, json_reply
from caravan_router.http.server.routes import Routes
from caravan_router.http.server.state import CLIENT, STATE
from caravan_router.http.server.tags import Tag

_PARAMETERS = tuple(
    Parameter(name=name, place="query", description=description)
    for name, description in (
        ("start_time", "Seconds since 1970 on the first day; left out: `limit` days ago"),
        ("end_time", "Seconds since 1970, exclusive; left out: now"),
        ("bucket_width", "`1d`"),
        ("group_by", "`api_key_id`, `session`, `model`; may be repeated"),
        ("api_key_ids", "Only these names of API keys; may be repeated"),
        ("sessions", "Only these sessions; may be repeated"),
        ("models", "Only these models; may be repeated"),
        ("limit", "Days per page, 1 to 31; left out: 7"),
        ("page", "`next_page` of the page before"),
    )
)

ROUTES = Routes(OPENAI, tag=Tag.OPENAI, parameters=_PARAMETERS, errors=(400, 403, 503))


@ROUTES.route(
    "GET",
    "/v1/organization/usage/completions",
    "Return the tokens that API keys have generated, by day",
    reply=UsagePage[CompletionsUsage],
)
async def completions_used(request: web.Request) -> web.Response:
    """Raises ValidationError, ForbiddenError, UsageUnreadableError."""
    return await _used(request, Kind.COMPLETIONS, completions_usage)


@ROUTES.route(
    "GET",
    "/v1/organization/usage/embeddings",
    "Return the tokens that API keys have embedded, scored or ranked, by day",
    reply=UsagePage[EmbeddingsUsage],
)
async def embeddings_used(request: web.Request) -> web.Response:
    """Raises ValidationError, ForbiddenError, UsageUnreadableError."""
    return await _used(request, Kind.EMBEDDINGS, embeddings_usage)


async def _used(
    request: web.Request, kind: Kind, shown: Callable[[UsageQuery, Account, Counts], Result]
) -> web.Response:
    query = usage_query(request.query.items(), request[CLIENT].key, time.time())
    rows = await request.app[STATE].accounts.read(query.page, kind, query.groups, query.only)
    return json_reply(usage_page(query, rows, shown))
