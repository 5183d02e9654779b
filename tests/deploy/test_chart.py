"""The Helm chart: every value set renders objects that Kubernetes and the programs accept."""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from deploy.chart import (
    CHART,
    MANIFESTS,
    RENDERED,
    SCHEMA,
    VALUE_SETS,
    VERSIONS,
    complaints_about,
    containers,
    flags_of,
    manifest,
    rendered,
    workloads,
)
from deploy.tools import run_tool, try_tool
from deploy.values_table import README, with_table

from caravan_proto import __version__
from caravan_proto.flags import load
from caravan_router.config import RouterConfig
from caravan_serve.cli import read_flags
from caravan_shard.config import ShardConfig

HERE = Path(__file__).parent
CRDS = HERE / "crds"


CONFIGS = {"router": RouterConfig, "shard": ShardConfig}
# Value sets whose routers watch EndpointSlices: by choice, or for a pool that scales from zero or spans hosts.
WATCHING = {"endpoint-slices", "keda-to-zero", "several-hosts", "azure"}


@cache
def custom_schemas() -> dict[str, Any]:
    """Return the JSON schemas of custom resources by kind."""
    schemas: dict[str, Any] = json.loads(run_tool("python", HERE / "custom_schemas.py"))
    return schemas | {path.stem: json.loads(path.read_text()) for path in CRDS.glob("*.json")}


def test_there_is_a_value_set_for_each_use() -> None:
    known = {"cpu-minimal", "gpu-pool", "two-models", "mtls", "keda-to-zero", "gateway-api", "endpoint-slices"}
    known |= {"openshift", "gated-download", "zones", "sidecar", "ipv6", "amd-gpu", "by-name"}
    assert set(VALUE_SETS) == known | {"several-hosts", "canary", "on-demand", "object-store", "azure"}


@pytest.mark.parametrize("name", VALUE_SETS)
def test_helm_lint_finds_nothing(name: str) -> None:
    said = run_tool("helm", "lint", "--strict", CHART, "--values", CHART / f"ci/{name}.yaml")
    assert "[WARNING]" not in said
    assert "[ERROR]" not in said


def test_every_object_of_kubernetes_is_valid() -> None:
    # Many are the same in several value sets.
    objects = {json.dumps(document): document for name in VALUE_SETS for document in rendered(name)}.values()
    builtin = [document for document in objects if document["kind"] not in custom_schemas()]
    groups = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": found["spec"]["template"]["spec"]}
        for found in workloads(list(objects))
        if found["kind"] == "LeaderWorkerSet"
    ]
    assert len(groups) == 2
    assert complaints_about(builtin + groups) == []


@pytest.mark.parametrize("name", VALUE_SETS)
def test_every_custom_resource_is_valid(name: str) -> None:
    for document in rendered(name):
        if document["kind"] in custom_schemas():
            jsonschema.validate(document, custom_schemas()[document["kind"]])


def test_the_validation_refuses_unknown_keys() -> None:
    builtin = [document for document in rendered("cpu-minimal") if document["kind"] == "StatefulSet"]
    builtin[0] = builtin[0] | {"spec": builtin[0]["spec"] | {"replicaz": 1}}
    complaints = complaints_about(builtin)
    assert len(complaints) == len(VERSIONS)
    assert all("replicaz" in complaint for complaint in complaints)
    checked = set()
    for name in VALUE_SETS:
        for document in rendered(name):
            if schema := custom_schemas().get(document["kind"]):
                wrong = document | {"spec": document["spec"] | {"replicaz": 1}}
                with pytest.raises(jsonschema.ValidationError):
                    jsonschema.validate(wrong, schema)
                checked.add(document["kind"])
    assert checked == set(custom_schemas())


def test_helm_test_asks_a_router_that_demands_certificates_whether_it_speaks_tls() -> None:
    text = run_tool("helm", "template", "caravan", CHART, "--values", CHART / "ci/ipv6.yaml")
    (pod,) = (found for found in yaml.safe_load_all(text) if found and found["kind"] == "Pod")
    assert complaints_about([pod]) == []
    program, url, *_ = pod["spec"]["containers"][0]["args"]
    assert url == "https://caravan-router:80/metrics"
    compile(program, "test", "exec")
    assert "wrap_socket" in program


def test_helm_test_asks_the_router_for_its_models() -> None:
    flags = ("--namespace", "caravan", "--show-only", "templates/tests/metrics.yaml")
    text = run_tool("helm", "template", "caravan", CHART, "--values", CHART / "ci/two-models.yaml", *flags)
    (pod,) = yaml.safe_load_all(text)
    assert complaints_about([pod]) == []
    assert pod["spec"]["containers"][0]["args"][1:] == [
        "http://caravan-router:80/metrics",
        *("qwen2.5-7b", "gemma-3-270m-q4_k_m.gguf"),
    ]


@pytest.mark.parametrize("name", VALUE_SETS)
def test_nothing_is_empty_or_has_another_namespace(name: str) -> None:
    def check(value: Any, path: str) -> None:
        assert value is not None, path
        for key, part in (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        ):
            check(part, f"{path}/{key}")

    names = [(document["kind"], document["metadata"]["name"]) for document in rendered(name)]
    assert len(set(names)) == len(names)
    for document in rendered(name):
        check(document, document["kind"])
        assert document["metadata"]["namespace"] == "caravan"


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_programs_accept_their_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    seen = set()
    for _, container in containers(rendered(name)):
        if (config := CONFIGS.get(container["name"])) is None:
            continue
        if container["args"][0] == "serve":
            read_flags(container["args"][1:])
            continue
        try:
            load(config, prog=container["name"], description="", argv=container["args"])
        except SystemExit:
            pytest.fail(f"{container['args']}\n{capsys.readouterr().err}")
        seen.add(container["name"])
    assert seen == (set() if name == "on-demand" else set(CONFIGS))


def test_flags_of_values_come_out_as_they_are() -> None:
    assert "--payload-limit=20000000" in flags_of("gpu-pool", "caravan-router")
    shard = flags_of("gpu-pool", "caravan-qwen-gpu")
    assert {"--ctx-size=65536", "--parallel=32", "--gpu-layers=-1", "--cache-type-k=q8_0"} < set(shard)
    assert "--alias=qwen2.5-7b" in flags_of("two-models", "caravan-large-t4")
    adapters = [flag for flag in flags_of("two-models", "caravan-large-t4") if flag.startswith("--lora")]
    assert adapters == ["--lora=poet=/models/qwen/poet.gguf", "--lora=jurist=/models/qwen/jurist.gguf"]
    assert {"--lora-dir=/adapters", "--max-loras=4"} < set(flags_of("sidecar", "caravan-smollm-cpu"))
    assert flags_of("two-models", "caravan-router").index("--expected-model=gemma-3-270m-q4_k_m.gguf") < flags_of(
        "two-models", "caravan-router"
    ).index("--expected-model=qwen2.5-7b")


@pytest.mark.parametrize("name", VALUE_SETS)
def test_pods_have_no_privileges(name: str) -> None:
    for owner, container in containers(rendered(name)):
        pod = owner["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is False
        # A Service that is called caravan would set CARAVAN_PORT, which is a flag.
        assert pod["enableServiceLinks"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        # OpenShift has user IDs of its own.
        assert pod["securityContext"].get("runAsUser") == (None if name == "openshift" else 10001)
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is ((name, container["name"]) != ("sidecar", "shard"))


@pytest.mark.parametrize("name", VALUE_SETS)
def test_pods_are_not_killed_while_they_drain(name: str) -> None:
    for owner, container in containers(rendered(name)):
        if container["name"] not in CONFIGS:
            continue
        grace_s = owner["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        before_s = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        (drain_s,) = (
            float(flag.partition("=")[2])
            for flag in container["args"]
            if flag.startswith(("--drain-timeout-s=", "--graceful-termination-timeout="))
        )
        # A router answers on open connections for two seconds more; a shard closes its files.
        assert grace_s >= before_s + drain_s + 10


@pytest.mark.parametrize("name", VALUE_SETS)
def test_selectors_match_the_pods_that_they_mean(name: str) -> None:
    owners = {owner["metadata"]["name"]: owner for owner in workloads(rendered(name))}
    pods = {key: owner["spec"]["template"]["metadata"]["labels"] for key, owner in owners.items()}

    def selected(labels: dict[str, str]) -> set[str]:
        return {key for key, own in pods.items() if labels.items() <= own.items()}

    for key, owner in owners.items():
        assert selected(owner["spec"]["selector"]["matchLabels"]) == {key}
    for document in rendered(name):
        spec = document.get("spec", {})
        match document["kind"]:
            case "Service":
                assert selected(spec["selector"]) == {document["metadata"]["name"]}
            case "PodDisruptionBudget":
                assert selected(spec["selector"]["matchLabels"]) == {document["metadata"]["name"]}
            case "InferencePool":
                assert selected(spec["selector"]["matchLabels"]) == {"caravan-router"}
            case "ScaledObject" | "HorizontalPodAutoscaler":
                wanted = (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
                (target,) = (one for one in rendered(name) if (one["kind"], one["metadata"]["name"]) == wanted)
                assert target["apiVersion"] == spec["scaleTargetRef"]["apiVersion"]
                assert "replicas" not in target["spec"]
            case _:
                pass


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_router_finds_every_pool_by_its_headless_service(name: str) -> None:
    services = {document["metadata"]["name"]: document for document in rendered(name) if document["kind"] == "Service"}
    pools = {
        owner["metadata"]["name"] for owner, container in containers(rendered(name)) if container["name"] == "shard"
    }
    flags = flags_of(name, "caravan-router")
    watches = name in WATCHING
    assert {flag for flag in flags if flag.startswith("--shard=")} == {
        f"--shard=k8s:caravan/{pool}:50051" if watches else f"--shard=dns:{pool}.caravan.svc:50051" for pool in pools
    }
    for pool in pools:
        assert services[pool]["spec"]["clusterIP"] == "None"
        assert services[pool]["spec"]["publishNotReadyAddresses"] is False


@pytest.mark.parametrize("name", VALUE_SETS)
def test_volumes_and_their_mounts_belong_together(name: str) -> None:
    for owner in workloads(rendered(name)):
        pod = owner["spec"]["template"]["spec"]
        claims = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])}
        volumes = {volume["name"] for volume in pod["volumes"]} | claims
        mounted = {
            mount["name"]
            for container in pod.get("initContainers", []) + pod["containers"]
            for mount in container.get("volumeMounts", [])
        }
        assert mounted == volumes


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("cpu-minimal", "/livez"),  # the only shard stays with the old router until that ends
        ("keda-to-zero", "/livez"),
        ("mtls", "/readyz"),
        ("gateway-api", "/readyz"),
    ],
)
def test_a_new_router_waits_for_a_shard_only_where_there_is_one_to_spare(name: str, path: str) -> None:
    (router,) = (container for _, container in containers(rendered(name)) if container["name"] == "router")
    assert router["readinessProbe"]["httpGet"]["path"] == path
    assert router["startupProbe"]["httpGet"]["path"] == router["livenessProbe"]["httpGet"]["path"] == "/livez"


def test_certificates_have_the_name_that_the_router_requires() -> None:
    certificates = {
        document["spec"]["secretName"]: document for document in rendered("mtls") if document["kind"] == "Certificate"
    }
    assert f"--shard-hostname={certificates['caravan-shard-mtls']['spec']['dnsNames'][0]}" in flags_of(
        "mtls", "caravan-router"
    )
    for owner, container in containers(rendered("mtls")):
        volumes = {volume["name"]: volume for volume in owner["spec"]["template"]["spec"]["volumes"]}
        assert volumes["mtls"]["secret"]["secretName"] == f"caravan-{container['name']}-mtls"
        assert "--allow-plaintext=on" not in container["args"]


def test_keda_asks_for_the_pools_model_in_the_releases_namespace() -> None:
    (scaled,) = (document for document in rendered("keda-to-zero") if document["kind"] == "ScaledObject")
    queries = {trigger["name"]: trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"]}
    selector = '{namespace="caravan",model="Qwen2.5-7B-Instruct-Q4_K_M.gguf"}'
    requests = f"sum(tgi_queue_size{selector}) + sum(tgi_batch_current_size{selector})"
    # The pool `cpu` has a shard, which runs 6 requests. Twenty shards of this one run 12 each.
    assert queries["requests"] == f"clamp(({requests}) - 12, 0, 240) + 0"
    assert queries["kv-use"].count(selector) == 2
    assert not any("$" in query for query in queries.values())
    assert scaled["spec"]["minReplicaCount"] == 0


def test_the_schema_knows_every_value() -> None:
    schema = json.loads(SCHEMA.read_text())

    def check(part: Any) -> None:
        if isinstance(part, dict):
            # What only requires more of something is closed there.
            if any("type" in inner for inner in part.get("properties", {}).values()):
                assert part["additionalProperties"] is False
            for inner in part.values():
                check(inner)

    check(schema)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) | {"global"} == set(schema["properties"])
    assert set(values["shard"]) == set(schema["$defs"]["pool"]["properties"])
    assert set(values["router"]) == set(schema["properties"]["router"]["properties"])


def test_the_chart_has_the_version_of_the_programs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


@pytest.mark.parametrize("name", RENDERED)
def test_the_rendered_manifests_are_current(name: str) -> None:
    assert (MANIFESTS / f"{name}.yaml").read_text() == manifest(CHART / f"ci/{name}.yaml"), "run `make manifests`"


def test_the_table_of_values_is_current_and_has_every_value() -> None:
    readme = README.read_text()
    assert readme == with_table(readme), "run `make manifests`"
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (?:`(.*?)`)? \|", readme, re.MULTILINE))

    def check(values: dict[str, Any], above: str) -> None:
        for name, value in values.items():
            path = f"{above}{name}"
            if not re.fullmatch(r"[\w.]+", path):
                continue  # a label, or an annotation
            if rows.get(path):
                assert yaml.safe_load(rows[path]) == value, path
            elif isinstance(value, dict):
                check(value, f"{path}.")
            else:
                assert path in rows

    check(yaml.safe_load((CHART / "values.yaml").read_text()), "")


def test_yamllint_finds_nothing() -> None:
    # Helm writes lists without indentation.
    indentation = "{level: error, indent-sequences: whatever}"
    rules = f"{{extends: relaxed, rules: {{line-length: disable, comments: disable, indentation: {indentation}}}}}"
    run_tool("yamllint", "--strict", "-d", rules, CHART / "values.yaml", CHART / "Chart.yaml", CHART / "ci", MANIFESTS)


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
        ("shard.autoscaling.zeroWhenIdle=true", "models.smollm.pools.cpu: autoscaling.zeroWhenIdle is keda's"),
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
        ("source.download.nodePath=/x", "/models/llama/source/download': 'not' failed"),
        ("source.download.s3.region=x,source.download.env[0].name=AWS_REGION", "the chart sets AWS_REGION itself"),
        ("source.download.files[2].url=az://models/m.gguf", "az://models/m.gguf needs azure.account"),
        ("source.download.files[0].url=gs://b/k", "/files/0/url': 'gs://b/k' does not match pattern"),
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
