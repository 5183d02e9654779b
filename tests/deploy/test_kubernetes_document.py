"""docs/kubernetes.md: its values render valid objects, and its commands for helm work as they are written."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.chart import CHART, containers
from deploy.tools import ROOT, run_tool, try_tool

DOCUMENT = (ROOT / "docs/kubernetes.md").read_text()
VALUES = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
FIRST_LINES = [values.partition("\n")[0] for values in VALUES]


def render(*value_files: Path) -> list[dict[str, Any]]:
    flags = [part for path in value_files for part in ("--values", str(path))]
    text = run_tool("helm", "template", "caravan", CHART, "--namespace", "llm", *flags)
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.mark.parametrize("number", range(len(VALUES)), ids=FIRST_LINES)
def test_the_values_render(number: int, tmp_path: Path) -> None:
    # The first block is a whole file of values. The others are parts that are added to such a file.
    whole, part = tmp_path / "values.yaml", tmp_path / "part.yaml"
    whole.write_text(VALUES[0])
    part.write_text(VALUES[number])
    objects = render(whole, part)
    assert any(container["name"] == "shard" for _, container in containers(objects))


def test_the_commands_of_helm_work(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(VALUES[0])
    commands = [line for line in COMMANDS if line.startswith(("helm lint", "helm template"))]
    assert len(commands) == 2
    for command in commands:
        program, *words = shlex.split(command)
        run_tool(program, *(str(values) if word == "values.yaml" else word for word in words))


def test_the_refusal_is_the_one_that_is_shown(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(VALUES[0].replace("replicas:", "replica:"))
    (shown,) = re.findall(r"^```text\n(.*)\n```", DOCUMENT, re.MULTILINE)
    assert shown in try_tool("helm", "template", "caravan", CHART, "--values", values).stderr


def test_kubectl_names_what_the_chart_makes(tmp_path: Path) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(VALUES[0])
    made = {f"{found['kind'].lower()}/{found['metadata']['name']}" for found in render(values)}
    named = set(re.findall(r"\b(?:service|deployment)/[a-z-]+", DOCUMENT))
    assert named <= made
    for path in re.findall(r"--filename (\S+)", DOCUMENT):
        assert (ROOT / path).exists()
