"""Values that the chart refuses, by its schema or by its own checks, and what it says."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from deploy.chart import CHART, SCHEMA
from deploy.tools import try_tool


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("router.replicass=2", "at '/router': additional properties 'replicass' not allowed"),
        ("models.smollm.pools.cpu.gpu=1", "at '/models/smollm/pools/cpu': additional properties 'gpu' not allowed"),
        ("shard.flags.ctx-siz=3", "at '/shard/flags': additional properties 'ctx-siz' not allowed"),
        ("shard.flags.parallel=0", "at '/shard/flags/parallel': minimum: got 0, want 1"),
        ("shard.flags.kv-layout=spilt", "at '/shard/flags/kv-layout': value must be one of 'auto', 'unified', 'split'"),
        ("shard.flags.model=x", "at '/shard/flags': additional properties 'model' not allowed"),
        ("router.replicas=two", "at '/router/replicas': got string, want integer"),
        ("mtls.mode=on", "at '/mtls/mode': value must be one of 'off', 'secrets', 'cert-manager'"),
        ("models.smollm.source.image.reference=a", "at '/models/smollm/source': maxProperties: got 2, want 1"),
        ("models.Large.file=x", "'Large' does not match pattern"),
        ("models.a.source.claim.name=x,models.a.pools.x.replicas=1", "at '/models/a': missing property 'file'"),
        ("models.smollm=null", "at '/models/smollm': got null, want object"),
        ("monitoring.prometheusUrl=prometheus:9090", "at '/monitoring/prometheusUrl'"),
        (
            "networkPolicy.enabled=false",
            "anyone who reaches a shard commands it: set mtls.mode, or networkPolicy.enabled",
        ),
        ("shard.autoscaling.type=keda", "autoscaling by keda needs monitoring.prometheusUrl"),
        ("mtls.mode=secrets", "mtls.mode secrets needs routerSecretName and shardSecretName"),
        ("router.drainSeconds=600", "router.shardGraceSeconds must be at least router.drainSeconds"),
        ("defaultModel=large", "defaultModel: models has no large"),
        ("router.flags.state-file=/x", "at '/router/flags': additional properties 'state-file' not allowed"),
        (
            "models.a.file=SmolLM2-135M-Instruct.Q4_1.gguf,models.a.source.claim.name=x,models.a.pools.x.replicas=1",
            "two models have the name SmolLM2-135M-Instruct.Q4_1.gguf, by which clients call them: set models.smollm",
        ),
        ("router.replicas=2", "models.smollm: 2 routers need as many shards, because a shard belongs to one router"),
        ("router.replicas=2,shard.replicas=2,router.state.type=claim", "set sessionAffinity.enabled, or router.replic"),
        (
            (
                "router.replicas=2,shard.replicas=2,sessionAffinity.enabled=true,inferencePool.enabled=true,"
                "inferencePool.endpointPicker.name=x"
            ),
            "with inferencePool, the endpoint picker chooses the router",
        ),
        ("ingress.enabled=true", "ingress: anyone who reaches the router may use it: set apiKeys.secretName"),
        ("service.type=LoadBalancer", "service.type LoadBalancer: anyone who reaches the router may use it"),
        ("tls.clientCaSecretName=x", "tls.clientCaSecretName needs tls.secretName"),
        ("networkPolicy.clients[0].podSelector.a=b,monitoring.serviceMonitor.enabled=true", "networkPolicy.prometheus"),
        (
            "shard.resources.limits.memory=2Gi",
            "models.smollm.pools.cpu.resources: limits.memory 2Gi is below requests.mem",
        ),
        ("router.resources.limits.cpu=100m", "router.resources: limits.cpu 100m is below requests.cpu 1"),
        ("shard.env[0].name=POD_NAME", "models.smollm.pools.cpu.env: the chart sets POD_NAME itself"),
        ("router.env[0].name=POD_IP", "router.env: the chart sets POD_IP itself"),
        ("router.env[0].name=A,router.env[1].name=A", "router.env has A twice"),
        ("router.extraVolumes[0].name=tmp", "router.extraVolumes: the chart sets tmp itself"),
        ("shard.extraContainers[0].name=shard", "initContainers or extraContainers: the chart sets shard itself"),
        ("router.extraVolumes[0].name=api-token", "router.extraVolumes: the chart sets api-token itself"),
        (
            "router.extraVolumeMounts[0].name=x,router.extraVolumeMounts[0].mountPath=/x",
            "there is no volume x",
        ),
        (
            "router.extraVolumeMounts[0].name=tmp,router.extraVolumeMounts[0].mountPath=/tmp/",
            "router.extraVolumeMounts: the chart sets /tmp itself",
        ),
        ("commonLabels.app=has space", "at '/commonLabels/app': 'has space' does not match pattern"),
        ("shard.podLabels.a/b/c=x", "invalid propertyName 'a/b/c'"),
        (
            "shard.cache.type=emptyDir,shard.cache.gibibytes=20,shard.resources.limits.ephemeral-storage=20Gi",
            "limits.ephemeral-storage 20Gi is less than the 23552Mi of the pod's emptyDirs",
        ),
        (
            "inferencePool.enabled=true,inferencePool.endpointPicker.name=x,tls.secretName=x",
            "Gateways speak plain HTTP to the members of an InferencePool",
        ),
        ("service.loadBalancerSourceRanges[0]=10.0.0.1", "at '/service/loadBalancerSourceRanges/0'"),
        ("router.podLabels.app\\.kubernetes\\.io/name=x", "router.podLabels: the chart sets app.kubernetes.io/name"),
        ("commonLabels.caravan/pool=x", "commonLabels: the chart sets caravan/pool itself"),
        (
            (
                "models.smollm.pools.cpu-a.replicas=1,models.smollm-cpu.file=b,models.smollm-cpu.source.claim.name=b,"
                "models.smollm-cpu.pools.a.replicas=1"
            ),
            "models.smollm.pools.cpu-a and models.smollm-cpu.pools.a would both be called caravan-smollm-cpu-a",
        ),
        (
            "fullnameOverride=a234567890123456789012345678901234567890,models.smollm.pools.a23456.replicas=1",
            "shorten models.",
        ),
    ],
)
def test_wrong_values_are_refused_with_a_readable_message(change: str, message: str) -> None:
    run = try_tool("helm", "template", "caravan", CHART, "--values", CHART / "ci/cpu-minimal.yaml", "--set", change)
    assert run.returncode != 0
    assert message in run.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("file=other.gguf", "source.download.files: none is other.gguf, which the model's shards load"),
        ("source.download.files[2].url=http://x/a", "the token would be sent in plaintext to http://x/a"),
        ("source.download.files[2].name=b.gguf,source.download.files[1].name=b.gguf", "files has b.gguf twice"),
        ("source.download.storageClassName=fast", "/models/llama/source/download': 'not' failed"),
        ("source.download.ca.secretName=x", "/models/llama/source/download/ca': 'oneOf' failed"),
        ("source.download.env[0].name=DOWNLOAD_TOKEN", "download.env: the chart sets DOWNLOAD_TOKEN itself"),
    ],
)
def test_wrong_downloads_are_refused_with_a_readable_message(change: str, message: str) -> None:
    changes = [word for part in change.split(",") for word in ("--set", f"models.llama.{part}")]
    run = try_tool("helm", "template", "caravan", CHART, "--values", CHART / "ci/gated-download.yaml", *changes)
    assert run.returncode != 0
    assert message in run.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "file=x.gguf",
            "models.gemma.file: the files of models.gemma.source.download.name have the names that the hub",
        ),
        ("source.download.env[0].value=http://hub", "the token would be sent in plaintext to http://hub"),
        ("source.download.env[1].name=HF_TOKEN", "download.env: the chart sets HF_TOKEN itself"),
        ("source.download.env[1].name=HF_HOME", "download.env: the chart sets HF_HOME itself"),
        ("source.download.files[0].url=https://x/a", "/models/gemma/source/download': 'oneOf' failed"),
        ("source.download.name=null", "/models/gemma/source/download/name': got null, want string"),
        ("source.download.name=../x", "/models/gemma/source/download/name': '../x' does not match pattern"),
    ],
)
def test_wrong_downloads_by_name_are_refused_with_a_readable_message(change: str, message: str) -> None:
    run = try_tool(
        "helm", "template", "caravan", CHART, "--values", CHART / "ci/by-name.yaml", "--set", f"models.gemma.{change}"
    )
    assert run.returncode != 0
    assert message in run.stderr


def test_a_chart_without_models_says_that_it_needs_some() -> None:
    assert "at '/models': minProperties: got 0, want 1" in try_tool("helm", "template", "caravan", CHART).stderr


def _nulls(values: dict[str, Any], schema: dict[str, Any], known: dict[str, Any]) -> Iterator[str]:
    """Yield the paths of all values that the schema does not require, as helm's --set takes them."""
    pool = known["pool"] if schema.get("$ref") == "#/$defs/pool" else {}
    own = schema.get("properties", {})
    properties = own | {name: part | own.get(name, {}) for name, part in pool.get("properties", {}).items()}
    for name, value in values.items():
        key = name.replace(".", "\\.")
        if name not in schema.get("required", []):
            yield f"{key}=null"
        elif isinstance(value, dict):
            yield from (f"{key}.{path}" for path in _nulls(value, properties.get(name, {}), known))


def test_null_removes_whatever_the_templates_do_not_need() -> None:
    """A values file may take defaults away; what the templates cannot do without, the schema requires by name."""
    values, schema = yaml.safe_load((CHART / "values.yaml").read_text()), json.loads(SCHEMA.read_text())
    changes = [f"--set={path}" for path in _nulls(values, schema, schema["$defs"])]
    assert {"--set=shard.resources=null", "--set=router.nodeSelector=null", "--set=ingress.host=null"} <= set(changes)
    run = try_tool("helm", "template", "caravan", CHART, "--values", CHART / "ci/cpu-minimal.yaml", *changes)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("path", ["router.state", "shard.replicas", "shard.cache.type", "tls", "service.port"])
def test_null_is_refused_by_name_where_the_templates_need_a_value(path: str) -> None:
    values = CHART / "ci/cpu-minimal.yaml"
    run = try_tool("helm", "template", "caravan", CHART, "--values", values, "--set", f"{path}=null")
    above, _, name = f"/{path.replace('.', '/')}".rpartition("/")
    assert f"at '{above}': missing property '{name}'" in run.stderr
