"""Body fields that several dialects share, and marks of fields: without effect, refused, or read exactly."""

from typing import Annotated, Any, Literal, Protocol

import msgspec

# Keys of `Meta.extra`. Below a field that is exact, unknown fields are refused whatever the server tolerates elsewhere.
# A field that is refused is so by a rule of its own.
EXACT, NO_EFFECT, NEUTRAL, REFUSED = "caravan.exact", "caravan.no_effect", "caravan.neutral", "caravan.refused"
# What to do instead of sending a field that has no value to recommend.
ADVICE = "caravan.advice"


NoEffect = Annotated[Any, msgspec.Meta(description="Accepted and without effect.", extra={NO_EFFECT: True})]
OnlyEchoed = msgspec.Meta(description="Accepted and without effect; the reply repeats it.", extra={NO_EFFECT: True})
RefusedByRule = Annotated[Any, msgspec.Meta(description="Not supported.", extra={REFUSED: True})]
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
AdapterScales = Annotated[
    Any,
    msgspec.Meta(
        description="Not supported: a request names one adapter in `model`.",
        extra={NEUTRAL: (False, 0, "", [], {}, -1), ADVICE: "name an adapter in `model`"},
    ),
]
OnlyNull = Annotated[Any, msgspec.Meta(description="Not supported: accepted only if it is null.", extra={NEUTRAL: ()})]
TextOnly = Annotated[
    Any,
    msgspec.Meta(description='Accepted only with `["text"]`, which changes nothing.', extra={NEUTRAL: (["text"],)}),
]

Priority = Annotated[
    int | None,
    msgspec.Meta(
        description="Higher goes first; -100 to 100 and at most what the API key may ask for. Default 0. "
        "(vLLM's field of this name counts the other way.) Header for clients that cannot send it: X-Priority."
    ),
]

ModelName = Annotated[
    str | None,
    msgspec.Meta(
        description="Name of a model or of one of its adapters; left out: the default model. A single model answers to "
        "any name. Header for clients that cannot send it: X-Model."
    ),
]

ServiceTier = Annotated[
    str | None,
    msgspec.Meta(
        description="Stands for a priority that the API key may have: `flex` for -10; `priority`, `fast` and `scale` "
        "for 10; `ultrafast` for 20; all others for 0. The reply names the tier that was used."
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
        description="Requests share cached prefixes only with requests of the same salt and the same API key."
    ),
]


SessionId = Annotated[
    str | None,
    msgspec.Meta(
        description="The session, or conversation, that the request belongs to: 1 to 256 characters. The sessions of "
        "an API key share what it gets. Headers of agents, `prompt_cache_key` and others stand in for it."
    ),
]
PromptCacheKey = Annotated[
    str | None, msgspec.Meta(description="Names the session if nothing else does; it does not change what is cached.")
]

_KEPT = (
    "what is computed of the prompt is kept for this time after its last use, in memory or files, or in the KV cache "
    "where there are none, while the share of the API key pays for that"
)
CacheTtl = Annotated[Literal["5m", "30m", "1h", "12h", "24h"] | None, msgspec.Meta(description=f"If set, {_KEPT}.")]
CacheRetention = Annotated[
    Literal["in_memory", "in-memory", "24h"] | None,
    msgspec.Meta(description=f"If set, {_KEPT}; `in_memory` means 5 minutes."),
]


class CacheOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the prompt is cached. ``mode`` changes nothing: all prompts are cached."""

    mode: NoEffect = None
    ttl: CacheTtl = None


Speculate = Annotated[
    int | None,
    msgspec.Meta(
        description="Maximum number of draft tokens per step; 0 switches speculation off. The text does not depend on "
        "it. Default and maximum: the server's --speculate. Header for clients that cannot send it: X-Speculate."
    ),
]
Schema = Annotated[dict[str, Any] | str, msgspec.Meta(description="A JSON schema, as an object or as JSON text.")]


class ServingFields(Protocol):
    """Fields that every generating body has. This is a protocol because a msgspec struct can have only one base."""

    @property
    def priority(self) -> int | None: ...

    @property
    def timeout(self) -> float | None: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def session_id(self) -> str | None: ...

    @property
    def speculate(self) -> int | None: ...


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """Any text."""


class JsonObjectFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_object"):
    """Any JSON object; with TGI's ``value`` or llama-server's ``schema``, one that matches this schema."""

    value: Schema | None = None
    schema: Schema | None = None


class JsonFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json"):
    """JSON that matches a schema, in TGI's form."""

    value: Schema


class RegexFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="regex"):
    """Text that as a whole matches a regular expression in Rust's syntax, in TGI's form."""

    value: str


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``name`` and ``description`` are labels for people. The output matches the schema whatever ``strict`` says."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    """JSON that matches a schema, which OpenAI has in ``json_schema``, TGI in ``value``, llama-server in ``schema``."""

    json_schema: NamedSchema | None = None
    value: NamedSchema | None = None
    schema: Schema | None = None


Format = TextFormat | JsonObjectFormat | JsonFormat | JsonSchemaFormat | RegexFormat


class FirstDifference(msgspec.Struct, frozen=True):
    """Where a request goes on otherwise than the one it is compared with.

    ``token``: the first token of its prompt that differs is this one or one of the next 15. ``message``: index of
    the first message, or item, that differs; null if another part of the request does.
    """

    token: int
    message: int | None
