"""Values that the chart refuses, by its schema or by its own checks, and what it says."""

import pytest
from deploy.chart import CHART
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
        ("networkPolicy.enabled=false", "whoever reaches a shard commands it: set mtls.mode, or networkPolicy.enabled"),
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
        ("ingress.enabled=true", "ingress: whoever reaches the router may use it: set apiKeys.secretName"),
        ("service.type=LoadBalancer", "service.type LoadBalancer: whoever reaches the router may use it"),
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
