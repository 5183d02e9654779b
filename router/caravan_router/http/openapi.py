"""The OpenAPI 3.1 document, from the schema types and the route table.

``python -m caravan_router.http.openapi`` writes it to standard output.
"""

import sys
from typing import Any

import msgspec

from caravan_router.auth.key import MAX_PRIORITY, MIN_PRIORITY
from caravan_router.http.generation.serving import PRIORITY_HEADER, TIMEOUT_HEADER
from caravan_router.http.routes import EVENTS, ROUTES, Route
from caravan_router.http.server.error_bodies import ErrorBody, OpenAIErrorBody
from caravan_router.http.server.errors import is_openai_path

_DESCRIPTIONS = {
    400: "The body is not JSON; on /v1 also: the request is not valid",
    401: "No API key, or a wrong one",
    404: "No such route",
    405: "Not with this method",
    408: "The body took too long to come",
    413: "The body is too large",
    415: "The content type is not JSON, or the content coding neither gzip nor deflate",
    422: "The request is not valid",
    424: "The generation failed",
    429: "Too many generations are under way, or too many requests of this API key; or no turn came in time",
    500: "Something broke",
    503: "No shard is up",
    504: "It did not end within its `timeout`",
}

# A key is needed where the operator wants keys.
_SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {}]

_SERVING_HEADERS = [
    {"name": header, "in": "header", "description": f"`{field}` for clients that cannot send it", "schema": schema}
    for header, field, schema in (
        (PRIORITY_HEADER, "priority", {"type": "integer", "minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY}),
        (TIMEOUT_HEADER, "timeout", {"type": "number", "exclusiveMinimum": 0}),
    )
]


def document() -> dict[str, Any]:
    """The whole document."""
    types = _types()
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    by_type = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Caravan",
            "description": "Text generation by GGUF models. TGI's routes, OpenAI's under /v1, and Ollama's under /api.",
            "version": "1",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _types() -> list[Any]:
    types: list[Any] = [ErrorBody, OpenAIErrorBody]
    for route in ROUTES:
        types.extend(kind for _, kind in route.replies)
        types.extend(route.bodies)
    return types


def _operation(route: Route, by_type: dict[int, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": "_".join(filter(None, (route.handler.__name__, route.alias))),
        "summary": route.summary,
    }
    if route.bodies:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _any_of([by_type[id(kind)] for kind in route.bodies])}},
        }
    if not route.open:
        operation["security"] = _SECURITY
    if any("priority" in _fields(kind) for kind in route.bodies):
        operation["parameters"] = _SERVING_HEADERS
    envelope = by_type[id(OpenAIErrorBody if is_openai_path(route.path) else ErrorBody)]
    good: dict[str, Any] = {"description": "Good"}
    if route.replies:
        by_content: dict[str, list[dict[str, Any]]] = {}
        for content_type, kind in route.replies:
            by_content.setdefault(content_type, []).append(by_type[id(kind)])
        good["content"] = {
            # What goes wrong after a stream has begun is an event too.
            content_type: {"schema": _event([*schemas, envelope]) if content_type == EVENTS else _any_of(schemas)}
            for content_type, schemas in by_content.items()
        }
    operation["responses"] = {"200": good} | {
        str(status): {
            "description": _DESCRIPTIONS[status],
            "content": {"application/json": {"schema": envelope}},
        }
        for status in sorted({*route.errors, 500} | (set() if route.open else {401}))
    }
    return operation


def _fields(kind: type) -> set[str]:
    return {field.name for field in msgspec.structs.fields(kind)}


def _event(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each: its data is JSON, or the word that ends a stream of OpenAI's."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _any_of(schemas)}
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [{"type": "string", "const": "[DONE]"}, data]}},
        "required": ["data"],
    }


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def render() -> bytes:
    """As committed: stable order, two spaces, a line break at the end."""
    return msgspec.json.format(msgspec.json.encode(document(), order="sorted"), indent=2) + b"\n"


if __name__ == "__main__":
    sys.stdout.buffer.write(render())
