"""The committed description is the one the types and routes give."""

import json
from typing import Any

from caravan_router.http.openapi import document, render
from caravan_router.http.ops import openapi_document
from caravan_router.http.routes import ROUTES


def test_the_committed_document_is_current() -> None:
    assert render() == openapi_document(), "run `make openapi`"


def test_every_reference_leads_somewhere_and_ids_differ() -> None:
    whole = document()
    names = set(whole["components"]["schemas"])

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if "$ref" in node else []
            return own + [ref for value in node.values() for ref in references(value)]
        return [ref for value in node for ref in references(value)] if isinstance(node, list) else []

    assert {ref.removeprefix("#/components/schemas/") for ref in references(whole)} <= names
    ids = [operation["operationId"] for path in whole["paths"].values() for operation in path.values()]
    assert len(ids) == len(set(ids)) == len(ROUTES)


def test_error_replies_have_the_envelope_of_their_route() -> None:
    paths = json.loads(render())["paths"]

    def envelope(path: str) -> str:
        responses = paths[path]["post"]["responses"]
        schema: str = responses["429"]["content"]["application/json"]["schema"]["$ref"]
        return schema.rpartition("/")[2]

    assert envelope("/generate") == "ErrorBody"
    assert envelope("/v1/completions") == "OpenAIErrorBody"
