"""The committed protobuf code is what the .proto files say, and the chart's schema has the flags of the programs."""

import json
import subprocess
import sys
from pathlib import Path

from deploy.flag_schema import with_flags

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
