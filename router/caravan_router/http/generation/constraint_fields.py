"""What an output must match, in the words of OpenAI, TGI and vLLM."""

from typing import Annotated, Any

import msgspec

Schema = Annotated[dict[str, Any] | str, msgspec.Meta(description="A JSON schema, as an object or as JSON text.")]


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """Anything."""


class JsonObjectFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_object"):
    """Any JSON object; with TGI's ``value``, one that matches this schema."""

    value: Schema | None = None


class JsonFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json"):
    """TGI's: JSON that matches the schema."""

    value: Schema


class RegexFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="regex"):
    """TGI's: text that matches a regular expression in Rust's syntax from its first character to its last."""

    value: str


class NamedSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``name`` and ``description`` are labels for people. The output matches whatever ``strict`` says."""

    schema: Schema
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="json_schema"):
    """JSON that matches a schema: under ``json_schema`` as OpenAI has it, or under ``value`` as TGI has it."""

    json_schema: NamedSchema | None = None
    value: NamedSchema | None = None


Format = TextFormat | JsonObjectFormat | JsonFormat | JsonSchemaFormat | RegexFormat


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's; exactly one of them. ``grammar`` is GBNF if a line has ``::=``, else Lark as llguidance reads it."""

    json: Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
