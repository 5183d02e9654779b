"""Fields of every generating route's body."""

from typing import Annotated

import msgspec

Priority = Annotated[
    int | None,
    msgspec.Meta(
        description="Higher goes first; -100 to 100 and at most what the API key may ask for. Default 0. "
        "(vLLM's field of this name counts the other way.) Header for clients that cannot send it: X-Priority."
    ),
]

Timeout = Annotated[
    float | None,
    msgspec.Meta(
        description="Seconds from joining the queue to the last token; then it ends as `deadline_exceeded`. "
        "Header for clients that cannot send it: X-Request-Timeout."
    ),
]

CacheSalt = Annotated[
    str | None,
    msgspec.Meta(
        description="Requests share what is computed of a common prefix only with the same salt and the same API key."
    ),
]


class ServingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    priority: Priority = None
    timeout: Timeout = None
    cache_salt: CacheSalt = None
