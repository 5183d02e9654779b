"""Makes the OpenAPI 3.1 document from the body types and the route table.

``python -m caravan_router.http.openapi`` writes it to standard output.
"""

import sys
from typing import Any

import msgspec

from caravan_dialects.api.generation.context import MODEL_HEADER
from caravan_dialects.api.generation.serving import PRIORITY_HEADER, SPECULATE_HEADER, TIMEOUT_HEADER
from caravan_dialects.auth.key import MAX_PRIORITY, MIN_PRIORITY
from caravan_proto.messages.sampling import RANGES
from caravan_router.http.docs.examples import EXAMPLES, Example
from caravan_router.http.routes import DIALECTS_OF_ROUTES, ROUTES
from caravan_router.http.server.form import FORM
from caravan_router.http.server.route import EVENTS, GENERATION_ERRORS, JSON, Parameter, Route
from caravan_router.http.server.tags import DESCRIPTIONS, Tag

_ABOUT = (
    "Text generation by GGUF models. TGI's routes, OpenAI's and Anthropic's under /v1, Google's under /v1beta, and "
    "Ollama's under /api. Every route takes a key as `x-api-key` or `x-goog-api-key`, too."
)
_STATUSES = {
    400: "The body is neither JSON nor a form; under /v1 also: the request is not valid",
    401: "The API key is missing or unknown",
    402: "The API key has used its tokens of this day or month",
    403: "The API key is not an operator's; without API keys: another host asks",
    404: "There is no such model, request, response, conversation or shard",
    405: "The route does not take this method",
    409: "The conversation is in use or has changed",
    408: "The body did not arrive in time",
    410: "The request was aborted by `DELETE /v1/requests/{id}`",
    413: "The body is too large",
    415: "The content type is neither JSON nor that of a form, or the content coding neither gzip nor deflate",
    422: "The request is not valid",
    424: "The generation failed",
    426: "The route takes WebSocket connections only, or they are switched off",
    429: "The model or the API key is at its limit, or the request waited in the queue for too long",
    500: "The router failed",
    503: "No shard is up, or stored responses and conversations cannot be read or written",
    504: "The request did not end within its `timeout`",
}

# A key is optional in the document, since operators choose whether the API needs one.
_SECURITY: list[dict[str, list[str]]] = [{"bearer": []}, {}]

_SERVING_HEADERS = [
    {"name": header, "in": "header", "description": f"`{field}` for clients that cannot send it", "schema": schema}
    for header, field, schema in (
        (PRIORITY_HEADER, "priority", {"type": "integer", "minimum": MIN_PRIORITY, "maximum": MAX_PRIORITY}),
        (TIMEOUT_HEADER, "timeout", {"type": "number", "exclusiveMinimum": 0}),
        (SPECULATE_HEADER, "speculate", {"type": "integer", "minimum": 0}),
    )
]


# Sampling parameters that have other names in some dialects.
_OTHER_NAMES = {"repeat_penalty": "repetition_penalty"}
_MODEL_HEADER = Parameter(name=MODEL_HEADER, place="header", description="`model` for clients that cannot send it")


def document() -> dict[str, Any]:
    """Return the document."""
    types = _types()
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for component in components.values():
        # Unknown fields are ignored, unless the operator wants to know of them.
        if component.get("additionalProperties") is False:
            del component["additionalProperties"]
        for name, described in component.get("properties", {}).items():
            _add_range(_OTHER_NAMES.get(name, name), described)
    by_type = {id(kind): schema for kind, schema in zip(types, schemas, strict=True)}
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_type)
    _add_links(paths)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Caravan",
            "description": _ABOUT,
            "version": "1",
        },
        "tags": [{"name": tag, "description": DESCRIPTIONS[tag]} for tag in Tag],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _add_links(paths: dict[str, dict[str, Any]]) -> None:
    """Tell of each reply which parameters of other operations take their values from it."""
    replies = {
        operation["operationId"]: operation["responses"]["200"]
        for path in paths.values()
        for operation in path.values()
    }
    for route in ROUTES:
        for parameter, source in _example(route).sources.items():
            links = replies[source.operation].setdefault("links", {})
            links[f"{route.operation_id}_{parameter}"] = {
                "operationId": route.operation_id,
                "parameters": {parameter: f"$response.body#{source.pointer}"},
            }


def _example(route: Route) -> Example:
    return EXAMPLES.get(route.handler.__name__, Example())


def _add_range(name: str, described: dict[str, Any]) -> None:
    """Add the bounds of a sampling parameter to the schema of its field, but for those that it has."""
    allowed = RANGES.get(name)
    for kind in described.get("anyOf", [described]):
        if allowed is not None and kind.get("type") in {"integer", "number"}:
            if not {"minimum", "exclusiveMinimum"} & described.keys():
                kind["exclusiveMinimum" if allowed.above_low else "minimum"] = allowed.lowest_sent
            if not {"maximum", "exclusiveMaximum"} & described.keys():
                kind["maximum"] = allowed.high


def _types() -> list[Any]:
    types: list[Any] = list(dict.fromkeys(route.dialect.envelope for route in ROUTES))
    for route in ROUTES:
        types.extend(kind for _, kind in route.replies)
        types.extend(route.body)
        if route.form is not None:
            types.append(route.form)
    return types


def _operation(route: Route, by_type: dict[int, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.operation_id,
        "summary": route.summary,
        "tags": [route.tag],
    }
    example = _example(route)
    if example.needs:
        operation["description"] = example.needs
    if route.body:
        content: dict[str, Any] = {"schema": _any_of([by_type[id(kind)] for kind in route.body])}
        if example.bodies:
            content["examples"] = {name: {"value": body} for name, body in example.bodies.items()}
        operation["requestBody"] = {"required": True, "content": {JSON: content}}
    if route.form is not None:
        content = {"schema": by_type[id(route.form)], "example": dict(example.form)}
        operation["requestBody"] = {"required": True, "content": {FORM: content}}
    if not route.open:
        operation["security"] = _SECURITY
    parameters = [_parameter(parameter, example.values.get(parameter.name)) for parameter in route.parameters]
    # Routes that count or render generate nothing, and do not read them, though their bodies have the fields.
    if {*GENERATION_ERRORS} <= {*route.errors} and any("priority" in _fields(kind) for kind in route.body):
        parameters += _SERVING_HEADERS
    if any("model" in _fields(kind) for kind in route.body):
        parameters.append(_parameter(_MODEL_HEADER))
    if parameters:
        operation["parameters"] = parameters
    envelope = _any_of([by_type[id(kind)] for kind in _envelopes(route)])
    good: dict[str, Any] = {"description": "Good"}
    if route.replies:
        by_content: dict[str, list[dict[str, Any]]] = {}
        for content_type, kind in route.replies:
            by_content.setdefault(content_type, []).append(by_type[id(kind)])
        good["content"] = {
            # An error after a stream has started is an event, too.
            content_type: {"schema": _event([*schemas, envelope]) if content_type == EVENTS else _any_of(schemas)}
            for content_type, schemas in by_content.items()
        }
    operation["responses"] = {"200": good} | {
        str(status): {
            "description": _STATUSES[status],
            "content": {"application/json": {"schema": envelope}},
        }
        for status in sorted({*route.errors, 500, *_access_errors(route)})
    }
    return operation


def _envelopes(route: Route) -> list[type]:
    """Return the types of errors: those of each dialect that has the path."""
    others = [dialect for (path, _), dialect in DIALECTS_OF_ROUTES.by_header.items() if path == route.path]
    return list(dict.fromkeys(dialect.envelope for dialect in (route.dialect, *others)))


def _access_errors(route: Route) -> tuple[int, ...]:
    if route.operator:
        return (401, 403)
    return () if route.open else (401,)


def _parameter(parameter: Parameter, example: str | None = None) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.description,
        "required": parameter.place == "path",
        "schema": {"type": "string"},
    }
    return described if example is None else described | {"example": example}


def _fields(kind: type) -> set[str]:
    return {field.name for field in msgspec.structs.fields(kind)}


def _event(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the schema of an event: its data is JSON, or the word that ends one of OpenAI's streams."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": _any_of(schemas)}
    return {
        "type": "object",
        "properties": {"data": {"anyOf": [{"type": "string", "const": "[DONE]"}, data]}},
        "required": ["data"],
    }


def _any_of(schemas: list[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def render() -> bytes:
    """Return the document as it is committed: indented by two spaces, with a final line break.

    Keys are sorted, but those of examples, whose fields are in the order in which people write them.
    """
    whole = document()
    for operation in (one for path in whole["paths"].values() for one in path.values()):
        for content in operation.get("requestBody", {}).get("content", {}).values():
            if "examples" in content:
                content["examples"] = msgspec.Raw(msgspec.json.encode(content["examples"]))
    return msgspec.json.format(msgspec.json.encode(whole, order="sorted"), indent=2) + b"\n"


if __name__ == "__main__":
    sys.stdout.buffer.write(render())
