"""Generated files are current: openapi.json, the schema of the chart's flags, the code of the .proto files."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from deploy.flag_schema import with_flags

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


ROOT = Path(__file__).resolve().parents[2]
GENERATED = Path("caravan_proto/shard/v1")


def test_the_generated_code_is_current(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "proto/generate.sh", tmp_path],
        check=True,
        capture_output=True,
        env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"},
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / GENERATED).iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "proto" / GENERATED).glob("*_pb2*")}
    assert fresh == committed, "run `make proto` and commit the result"


def test_the_charts_schema_has_the_current_flags() -> None:
    schema = json.loads((ROOT / "deploy/helm/caravan/values.schema.json").read_text())
    assert schema == with_flags(schema), "run `make manifests` and commit the result"
