"""Renders the OpenAPI document as one HTML page: a table of contents, each operation with its examples, and the types.

It needs no script to be read; with one, it sends the examples to its server.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from importlib import resources
from typing import Any

from caravan_router.http.docs.examples import MODEL, REQUEST_ID
from caravan_router.http.server.form import FORM
from caravan_router.http.server.route import Compressed

_PREFIX = "#/components/schemas/"


@dataclass(frozen=True, slots=True)
class DocsPage:
    """``policy``: its Content-Security-Policy, which allows its own style and script, and requests to its server."""

    html: Compressed
    policy: str


@dataclass(frozen=True, slots=True)
class _Operation:
    """``sources``: by parameter, the operation whose reply has its value, and the place in it."""

    method: str
    path: str
    described: Mapping[str, Any]
    sources: Mapping[str, tuple[str, str]]

    @property
    def id(self) -> str:
        return str(self.described["operationId"])


def render(document: Mapping[str, Any]) -> DocsPage:
    """Return the page. Reads files of the package."""
    style = _file("caravan_studio.page", "style/theme.css") + _file("caravan_router.http.docs", "docs.css")
    script = _file("caravan_router.http.docs", "docs.js")
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )
    html = (
        f"<!doctype html><html lang=en><meta charset=utf-8>"
        f"<meta name=viewport content='width=device-width, initial-scale=1'>"
        f"<title>{escape(document['info']['title'])} API</title><style>{style}</style>"
        f"<body data-model='{escape(MODEL)}' data-request-id='{REQUEST_ID}'>{_body(document)}<script>{script}</script>"
    )
    return DocsPage(Compressed(html.encode(), "text/html; charset=utf-8"), policy)


def _file(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_bytes().decode()


def _digest(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _body(document: Mapping[str, Any]) -> str:
    # Other spellings of a path stand after those that clients are told to use.
    operations = sorted(_operations(document["paths"]), key=lambda one: not one.path.startswith(("/v1", "/api/")))
    by_tag = {
        tag["name"]: (tag["description"], [one for one in operations if one.described["tags"] == [tag["name"]]])
        for tag in document["tags"]
    }
    schemas = document["components"]["schemas"]
    groups = (_group(tag, about, some) for tag, (about, some) in by_tag.items())
    types = (_type(name, schema) for name, schema in schemas.items())
    return (
        "<a class=skip href=#docs-operations>Skip the contents</a>"
        f"<header><h1>{escape(document['info']['title'])} API</h1>"
        "<p class=links><a href='./'>Page</a> <a href=openapi.json>openapi.json</a></p>"
        "<div id=docs-settings class=row hidden>"
        "<label>API key <input id=docs-key type=password autocomplete=off></label>"
        "<label>Model <select id=docs-model></select></label>"
        "<p id=docs-notice class=error role=status></p></div></header>"
        "<div class=columns><nav aria-label=Contents><details id=docs-contents open><summary>Contents</summary>"
        "<label id=docs-filter-label hidden>Filter <input id=docs-filter type=search></label>"
        f"{_contents(by_tag)}</details></nav>"
        f"<main id=docs-operations tabindex=-1><p>{_prose(document['info']['description'])}</p>{''.join(groups)}"
        f"<section id=docs-types><h2>Types</h2>{''.join(types)}</section></main></div>"
    )


def _operations(paths: Mapping[str, Any]) -> Iterator[_Operation]:
    sources: dict[str, dict[str, tuple[str, str]]] = {}
    described = [(method, path, one) for path, methods in paths.items() for method, one in methods.items()]
    for _, _, operation in described:
        for link in operation["responses"]["200"].get("links", {}).values():
            for name, expression in link["parameters"].items():
                found = operation["operationId"], expression.partition("#")[2]
                sources.setdefault(link["operationId"], {})[name] = found
    for method, path, operation in described:
        yield _Operation(method.upper(), path, operation, sources.get(operation["operationId"], {}))


def _contents(by_tag: Mapping[str, tuple[str, list[_Operation]]]) -> str:
    groups = "".join(
        f"<li><a href='#{_anchor(tag)}'>{escape(tag)}</a><ul>"
        + "".join(
            f"<li><a href='#{one.id}'>{_method(one.method)} <span>{escape(one.path)}</span></a></li>" for one in some
        )
        + "</ul></li>"
        for tag, (_, some) in by_tag.items()
    )
    return f"<ul>{groups}<li><a href='#docs-types'>Types</a></li></ul>"


def _anchor(tag: str) -> str:
    return "tag-" + "".join(letter if letter.isalnum() else "-" for letter in tag.lower())


def _method(method: str) -> str:
    return f"<b class='method {method.lower()}'>{method}</b>"


def _group(tag: str, about: str, operations: Iterable[_Operation]) -> str:
    return (
        f"<section id='{_anchor(tag)}'><h2>{escape(tag)}</h2><p>{_prose(about)}</p>"
        f"{''.join(map(_operation, operations))}</section>"
    )


def _operation(operation: _Operation) -> str:
    described = operation.described
    rows = [
        (f"{one['in']} <code>{escape(one['name'])}</code>", _prose(one["description"]))
        for one in described.get("parameters", ())
    ]
    rows += [("body", kinds) for kinds in _kinds(described.get("requestBody", {}))]
    for status, response in described["responses"].items():
        rows.append((status, "<br>".join((_prose(response["description"]), *_kinds(response)))))
    about = f"<p>{_prose(described['description'])}</p>" if "description" in described else ""
    return (
        f"<details class=folded id='{operation.id}'><summary><h3>{_method(operation.method)} "
        f"<code>{escape(operation.path)}</code></h3> <span>{_prose(described['summary'])}</span></summary>"
        f"<div class=inside>{about}{_form(operation)}{_table(rows)}</div></details>"
    )


def _form(operation: _Operation) -> str:
    """Return what sends a request, hidden until a script sends it."""
    fields = [
        _field(f"{one['name']} ({one['in']})", one["name"], one["in"], one.get("example", ""), operation)
        for one in operation.described.get("parameters", ())
        if one["in"] != "header"
    ]
    content = operation.described.get("requestBody", {}).get("content", {})
    for kind, described in content.items():
        fields += _form_fields(operation, described) if kind == FORM else [_body_field(operation, described)]
    return (
        f"<form class=try hidden data-method={operation.method} data-path='{escape(operation.path)}'>{''.join(fields)}"
        "<p class=row><button class=primary>Send</button><button type=button class=stop hidden>Stop</button>"
        "<button type=button class=curl>Show as curl</button><span class=status role=status></span></p>"
        f"<pre class=command tabindex=0 role=region aria-label='Command for {operation.id}' hidden></pre>"
        f"<pre class=answer tabindex=0 role=region aria-label='Answer of {operation.id}' hidden></pre></form>"
    )


def _field(label: str, name: str, place: str, value: str, operation: _Operation) -> str:
    attributes = ""
    if name in operation.sources:
        source, pointer = operation.sources[name]
        attributes = (
            f" data-source='{source}' data-pointer='{escape(pointer)}' placeholder='left empty: taken from {source}'"
        )
    return (
        f"<label class=field>{escape(label)} <input name='{escape(name)}' data-in={place} value='{escape(value)}' "
        f"autocomplete=off spellcheck=false{attributes}></label>"
    )


def _form_fields(operation: _Operation, described: Mapping[str, Any]) -> Iterator[str]:
    yield "<label class=field>file (form) <input type=file name=file data-in=form></label>"
    for name, value in described.get("example", {}).items():
        yield _field(f"{name} (form)", name, "form", value, operation)


def _body_field(operation: _Operation, described: Mapping[str, Any]) -> str:
    texts = {
        name: json.dumps(one["value"], indent=2, ensure_ascii=False) for name, one in described["examples"].items()
    }
    first = next(iter(texts.values()))
    buttons = "".join(
        f"<button type=button class=example aria-pressed={'true' if text is first else 'false'} "
        f"data-body='{escape(text)}'>{escape(name)}</button>"
        for name, text in texts.items()
    )
    chosen = f"<p class=row role=group aria-label=Examples>{buttons}</p>" if len(texts) > 1 else ""
    return (
        f"{chosen}<label class=field>Body of {operation.id} <textarea spellcheck=false data-in=body "
        f"rows={min(first.count(chr(10)) + 2, 16)}>{escape(first)}</textarea></label>"
    )


def _kinds(holder: Mapping[str, Any]) -> list[str]:
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
    return (
        f"<details class=folded id='{escape(name)}'><summary><h3><code>{escape(name)}</code></h3></summary>"
        f"<div class=inside><p>{about}</p>{_table(rows)}</div></details>"
    )


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a type in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].removeprefix(_PREFIX))
        return f"<a href='#{name}'>{name}</a>"
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
    """Return HTML in which what stands in backquotes is code."""
    parts = escape(text).replace("``", "`").split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th scope=row>{first}<td>{second}" for first, second in rows) + "</table>"
