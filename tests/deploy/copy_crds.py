"""Copy the schemas of custom resources that tests validate manifests with from the definitions of their projects.

``python -m deploy.copy_crds FOLDER`` reads the definitions that projects publish (Apache-2.0) and writes those of KINDS
as JSON schemas into tests/deploy/crds. They lose descriptions, and the parts that are pods: tests validate these with
Kubernetes' own schemas. Unknown fields are refused, where the API server would drop them silently.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

CRDS = Path(__file__).parent / "crds"
# The kinds that the chart renders, with the file of each, and what it comes from.
CHART_KINDS = {
    "HTTPRoute": ("gateway.networking.k8s.io_httproutes", "kubernetes-sigs/gateway-api 4564255ac, standard channel"),
    "InferencePool": (
        "inference.networking.k8s.io_inferencepools",
        "kubernetes-sigs/gateway-api-inference-extension 84436a96",
    ),
    "InferenceObjective": ("llm-d.ai_inferenceobjectives", "llm-d/llm-d-router ebab68792"),
    "LeaderWorkerSet": ("leaderworkerset.x-k8s.io_leaderworkersets", "kubernetes-sigs/lws, August 2026"),
}
# Those of manifests for other platforms.
PLATFORM_KINDS = {
    "ClusterServingRuntime": ("serving.kserve.io_clusterservingruntimes", "kserve/kserve aaac4e294"),
    "LLMInferenceServiceConfig": ("serving.kserve.io_llminferenceserviceconfigs", "kserve/kserve aaac4e294"),
}
# In the experimental channel only.
_SESSION_PERSISTENCE = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"type": {"enum": ["Cookie", "Header"]}},
}


def schema_of(definition: dict[str, Any], kind: str, source: str) -> dict[str, Any]:
    """Return the JSON schema of the stored version of a CustomResourceDefinition."""
    spec = definition["spec"]
    assert spec["names"]["kind"] == kind
    (version,) = (version for version in spec["versions"] if version["storage"])
    schema: dict[str, Any] = _trimmed(version["schema"]["openAPIV3Schema"])
    schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
    schema["properties"] |= {"apiVersion": {"const": f"{spec['group']}/{version['name']}"}, "kind": {"const": kind}}
    schema["properties"].pop("status", None)
    if kind == "HTTPRoute":
        rule = schema["properties"]["spec"]["properties"]["rules"]["items"]
        rule["properties"]["sessionPersistence"] = _SESSION_PERSISTENCE
    return {"description": f"{kind}, from {source}, Apache-2.0, without descriptions and pods."} | schema


def _trimmed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_trimmed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    properties = schema.get("properties")
    if isinstance(properties, dict):
        if "containers" in properties and "terminationGracePeriodSeconds" in properties:
            return {"type": "object"}
        if "imagePullPolicy" in properties and "volumeMounts" in properties:
            return {"type": "object"}
        if "awsElasticBlockStore" in properties or "nodeAffinity" in properties:
            return {"type": "object"}
    closed = {
        name: _trimmed(part)
        for name, part in schema.items()
        # Rules in CEL, which only an API server evaluates.
        if not (name == "description" and isinstance(part, str)) and name != "x-kubernetes-validations"
    }
    if isinstance(properties, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        closed["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    return closed


def main() -> None:
    """Write the schemas."""
    folder = Path(sys.argv[1])
    for target, kinds in ((CRDS, CHART_KINDS), (CRDS / "platforms", PLATFORM_KINDS)):
        target.mkdir(exist_ok=True)
        for kind, (name, source) in kinds.items():
            schema = schema_of(yaml.safe_load((folder / f"{name}.yaml").read_text()), kind, source)
            (target / f"{kind}.json").write_text(json.dumps(schema, indent=1) + "\n")


if __name__ == "__main__":
    main()
