"""The parameters of routes that list items."""

from caravan_dialects.api.openai.responses.items import DEFAULT_LIMIT, MAX_LIMIT
from caravan_router.http.server.route import Parameter

PAGE_PARAMETERS = (
    Parameter(name="after", place="query", description="Id of the item before the first one of the page"),
    Parameter(
        name="limit",
        place="query",
        description=f"Maximum number of items per page: 1 to {MAX_LIMIT}, default {DEFAULT_LIMIT}",
    ),
    Parameter(name="order", place="query", description="`desc`, the newest first (default), or `asc`"),
)
