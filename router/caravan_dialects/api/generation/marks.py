"""Marks of fields in the types of bodies: those without effect, those that are refused, and those read exactly."""

from typing import Annotated, Any

import msgspec

# Keys of `Meta.extra`. Below a field that is exact, unknown fields are refused whatever the server tolerates elsewhere.
EXACT, NO_EFFECT, NEUTRAL = "caravan.exact", "caravan.no_effect", "caravan.neutral"


NoEffect = Annotated[Any, msgspec.Meta(description="Accepted and without effect.", extra={NO_EFFECT: True})]
Unsupported = Annotated[
    Any,
    msgspec.Meta(
        description="Not supported: accepted only with the value that switches it off.",
        extra={NEUTRAL: (False, 0, "", [], {})},
    ),
]
SwitchedOff = Annotated[
    Any,
    msgspec.Meta(
        description="Not supported: accepted only with the value that switches it off, which may be -1.",
        extra={NEUTRAL: (False, 0, "", [], {}, -1)},
    ),
]
OnlyNull = Annotated[Any, msgspec.Meta(description="Not supported: accepted only if it is null.", extra={NEUTRAL: ()})]
TextOnly = Annotated[
    Any,
    msgspec.Meta(description='Accepted only with `["text"]`, which changes nothing.', extra={NEUTRAL: (["text"],)}),
]
