"""The Helm chart, and what it renders."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from deploy.tools import ROOT, run_tool

CHART = ROOT / "deploy/helm/caravan"
SCHEMA = CHART / "values.schema.json"
MANIFESTS = ROOT / "deploy/kubernetes"
VALUE_SETS = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))
# Rendered into deploy/kubernetes.
RENDERED = ("cpu-minimal", "gpu-pool", "mtls")
# Of Kubernetes, whose schemas its objects must meet.
VERSIONS = tuple(f"1.{minor}" for minor in range(31, 38))
_HEADER = """\
# Caravan without Helm, rendered from deploy/helm/caravan/ci/{name}.yaml by `make manifests`.
# Change the names of images, claims and Secrets before use.
"""


def render(values: Path, *flags: str) -> str:
    """Return the manifests that the chart renders from a file of values, as the release `caravan` in `caravan`."""
    command = ("template", "caravan", CHART, "--namespace", "caravan", "--values", values, "--skip-tests")
    return run_tool("helm", *command, *flags)


def manifest(values: Path) -> str:
    """Return the text of a file in deploy/kubernetes."""
    lines = (_HEADER.format(name=values.stem) + render(values)).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


@cache
def rendered(name: str) -> list[dict[str, Any]]:
    """Return the objects that the chart renders from a value set."""
    return [document for document in yaml.safe_load_all(render(CHART / f"ci/{name}.yaml")) if document]


def workloads(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what has a template of pods. The leaders and the workers of a LeaderWorkerSet count as two such objects."""
    for found in objects:
        if found["kind"] in ("Deployment", "StatefulSet"):
            yield found
        elif found["kind"] == "LeaderWorkerSet":
            pool = found["metadata"]["name"].removesuffix("-hosts")
            for part, name in (("leaderTemplate", pool), ("workerTemplate", f"{pool}-workers")):
                template = found["spec"]["leaderWorkerTemplate"][part]
                labels = {"matchLabels": template["metadata"]["labels"]}
                metadata = found["metadata"] | {"name": name}
                yield found | {"metadata": metadata, "spec": {"template": template, "selector": labels}}


def containers(objects: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each container, init containers too, with the object of `workloads` that has it."""
    for found in workloads(objects):
        pod = found["spec"]["template"]["spec"]
        for container in pod.get("initContainers", []) + pod.get("containers", []):
            yield found, container


def pod_of(name: str, workload: str) -> dict[str, Any]:
    """Return the spec of the pods of a Deployment or StatefulSet of a value set."""
    (pod,) = (
        document["spec"]["template"]["spec"]
        for document in workloads(rendered(name))
        if document["metadata"]["name"] == workload
    )
    found: dict[str, Any] = pod
    return found


def flags_of(name: str, workload: str) -> list[str]:
    """Return the flags of the router or shard in a Deployment or StatefulSet of a value set."""
    (flags,) = (
        container["args"]
        for container in pod_of(name, workload)["containers"]
        if container["name"] in ("router", "shard")
    )
    return list(flags)


def complaints_about(objects: list[dict[str, Any]]) -> list[str]:
    """Validate Kubernetes' own kinds strictly against the schemas of all VERSIONS."""
    program = Path(__file__).parent / "validate_builtin.py"
    found: list[str] = json.loads(run_tool("python", program, *VERSIONS, stdin=json.dumps(objects)))
    return found
