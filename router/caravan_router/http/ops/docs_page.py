"""Renders the OpenAPI document as one HTML page without scripts or external files."""

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h2 { border-top: 1px solid #8886; padding-top: 1rem } h2 code { font-size: 1.1rem }
table { border-collapse: collapse } td, th { text-align: left; vertical-align: top; padding: .2rem 1rem .2rem 0 }
code { font-family: ui-monospace, monospace } :root { color-scheme: light dark }
"""
_PREFIX = "#/components/schemas/"


def render_page(document: Mapping[str, Any]) -> str:
    """Return the page: routes first, then the types of their bodies and replies."""
    info = document["info"]
    operations = [
        _operation(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    types = [_type(name, schema) for name, schema in document["components"]["schemas"].items()]
    title = escape(info["title"])
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{escape(info['description'])} "
        f"The same for machines: <a href=/openapi.json>openapi.json</a>.</p>"
        f"{''.join(operations)}{''.join(types)}</html>"
    )


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    rows = [
        (f"{parameter['in']} <code>{escape(parameter['name'])}</code>", _prose(parameter["description"]))
        for parameter in operation.get("parameters", ())
    ]
    rows += [("body", kinds) for kinds in _contents(operation.get("requestBody", {}))]
    for status, response in operation["responses"].items():
        kinds = "<br>".join(_contents(response))
        rows.append(
            (status, f"{escape(response['description'])}<br>{kinds}" if kinds else escape(response["description"]))
        )
    return f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{_prose(operation['summary'])}</p>{_table(rows)}"


def _contents(holder: Mapping[str, Any]) -> list[str]:
    return [
        f"<code>{escape(content_type)}</code>: {_kind(content['schema'])}"
        for content_type, content in holder.get("content", {}).items()
    ]


def _type(name: str, schema: Mapping[str, Any]) -> str:
    required = schema.get("required", ())
    rows = [
        (
            f"<code>{escape(field)}</code>{' (needed)' if field in required else ''}",
            f"{_kind(kind)}<br>{_prose(kind['description'])}" if "description" in kind else _kind(kind),
        )
        for field, kind in schema.get("properties", {}).items()
    ]
    about = _prose(schema.get("description", ""))
    return f"<h2 id={escape(name)}><code>{escape(name)}</code></h2><p>{about}</p>{_table(rows)}"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a type in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_PREFIX))
        return f"<a href=#{name}>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(one) for one in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
    match schema.get("type"):
        case "array":
            return f"list of {_one(schema['items'])}" if schema.get("items") else "list"
        case "object" if schema.get("additionalProperties"):
            return f"map to {_one(schema['additionalProperties'])}"
        case str(kind):
            return escape(kind)
        case _:
            return "anything"


def _one(schema: Mapping[str, Any]) -> str:
    """Return a type in a few words, in parentheses if it is a choice of types."""
    return f"({_kind(schema)})" if "anyOf" in schema else _kind(schema)


def _prose(text: str) -> str:
    return escape(text).replace("``", "`")


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><td>{first}<td>{second}" for first, second in rows) + "</table>"
