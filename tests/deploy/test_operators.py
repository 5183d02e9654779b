"""What operators set beside models and pools: autoscaled routers, triggers, routes, canaries, scrapes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.chart import CHART, flags_of, pod_of, rendered
from deploy.tools import run_tool, try_tool

from caravan_proto import __version__
from caravan_serve.cli import read_flags


def only(name: str, kind: str, called: str = "") -> dict[str, Any]:
    (found,) = (
        document
        for document in rendered(name)
        if document["kind"] == kind and called in ("", document["metadata"]["name"])
    )
    return found


def rendered_with(values: str, folder: Path, base: str = "cpu-minimal") -> list[dict[str, Any]]:
    path = folder / "values.yaml"
    path.write_text(values)
    text = run_tool("helm", "template", "caravan", CHART, "--values", CHART / f"ci/{base}.yaml", "--values", path)
    return [document for document in yaml.safe_load_all(text) if document]


def test_routers_are_scaled_by_their_cpu_and_by_more_metrics(tmp_path: Path) -> None:
    scaler = only("canary", "HorizontalPodAutoscaler")["spec"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "caravan-router"}
    assert (scaler["minReplicas"], scaler["maxReplicas"]) == (2, 4)
    (cpu,) = scaler["metrics"]
    assert cpu["resource"] == {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}
    # Its number of routers is none of the chart's business.
    assert "replicas" not in only("canary", "Deployment")["spec"]
    metric = "{type: Pods, pods: {metric: {name: open_streams}, target: {type: AverageValue, averageValue: '200'}}}"
    changed = f"router: {{autoscaling: {{cpuUtilization: 0, metrics: [{metric}]}}}}"
    (scaler,) = (
        found["spec"]
        for found in rendered_with(changed, tmp_path, "canary")
        if found["kind"] == "HorizontalPodAutoscaler"
    )
    assert [one["type"] for one in scaler["metrics"]] == ["Pods"]


def test_a_pool_has_triggers_beside_those_of_the_chart() -> None:
    scaled = only("canary", "ScaledObject")["spec"]
    assert [trigger["name"] for trigger in scaled["triggers"]] == ["wanted", "office"]
    assert scaled["triggers"][1]["metadata"]["desiredReplicas"] == "8"
    assert scaled["pollingInterval"] == 10
    formula = scaled["advanced"]["scalingModifiers"]["formula"]
    assert formula == "max(wanted, office)"
    assert "scalingModifiers" not in only("keda-to-zero", "ScaledObject")["spec"]["advanced"]


def test_a_route_shares_its_requests_with_a_canary_by_weight() -> None:
    route = only("canary", "HTTPRoute")
    (rule,) = route["spec"]["rules"]
    assert [(backend["name"], backend["weight"]) for backend in rule["backendRefs"]] == [
        ("caravan-router", 95),
        ("next-caravan-router", 5),
    ]
    assert all(match["headers"] == [{"name": "X-Gateway-Model-Name", "value": "qwen"}] for match in rule["matches"])
    assert rule["filters"][0]["type"] == "ResponseHeaderModifier"
    assert route["metadata"]["labels"]["team"] == "ml"
    assert route["metadata"]["annotations"] == {"example.com/owner": "ml"}
    assert "weight" not in only("zones", "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]


def test_an_ingress_has_the_same_paths_for_each_of_its_hosts(tmp_path: Path) -> None:
    ingress = only("canary", "Ingress")["spec"]
    hosts = ["llm.example.com", "*.llm.example.com"]
    assert [rule["host"] for rule in ingress["rules"]] == ingress["tls"][0]["hosts"] == hosts
    first, second = (rule["http"] for rule in ingress["rules"])
    assert first == second
    (rule,) = only("zones", "Ingress")["spec"]["rules"]
    assert rule["host"] == "llm.example.com"
    changed = "ingress: {enabled: true}\napiKeys: {secretName: keys}"
    (ingress,) = (found["spec"] for found in rendered_with(changed, tmp_path) if found["kind"] == "Ingress")
    assert [set(rule) for rule in ingress["rules"]] == [{"http"}]


def test_weights_come_from_an_object_store_once_to_each_node() -> None:
    pod = pod_of("object-store", "caravan-qwen-cpu")
    (init,), (shard,) = pod["initContainers"], pod["containers"]
    file = "/models/qwen/Qwen2.5-7B-Instruct-Q4_K_M.gguf"
    assert init["args"][:2] == ["--file", f"s3:/{file}"]
    assert init["args"][3] == file
    assert f"--model={file}" in shard["args"]
    variables = {variable["name"]: variable for variable in init["env"]}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert variables[name]["valueFrom"]["secretKeyRef"] == {"name": "minio", "key": name}
    given = {name: variable["value"] for name, variable in variables.items() if "value" in variable}
    assert given == {"AWS_REGION": "eu-central-1", "AWS_ENDPOINT_URL": "https://minio.example.com:9000"}
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "model")
    # The kubelet would make a folder of root's, which the pod could not write.
    assert volume["hostPath"] == {"path": "/var/lib/caravan/models", "type": "Directory"}
    assert "ephemeral-storage" not in shard["resources"]["requests"]
    policy = only("object-store", "NetworkPolicy", "caravan-qwen-download")
    assert policy["spec"]["egress"][1]["ports"] == [{"port": 9000, "protocol": "TCP"}]


def test_weights_come_from_azures_blob_storage() -> None:
    (init,) = pod_of("azure", "caravan-qwen-cpu")["initContainers"]
    assert init["args"][1] == "az://models/qwen/Qwen2.5-7B-Instruct-Q4_K_M.gguf"
    secrets = [variable for variable in init["env"] if "valueFrom" in variable]
    assert [variable["name"] for variable in secrets] == ["AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN"]
    for variable in secrets:
        reference = variable["valueFrom"]["secretKeyRef"]
        assert reference == {"name": "azure", "key": variable["name"], "optional": True}
    given = {variable["name"]: variable["value"] for variable in init["env"] if "value" in variable}
    assert given == {"AZURE_STORAGE_ACCOUNT": "models"}
    policy = only("azure", "NetworkPolicy", "caravan-qwen-download")
    assert policy["spec"]["egress"][1]["ports"] == [{"port": 443, "protocol": "TCP"}]


def test_a_pool_may_have_several_shards_or_none_without_work() -> None:
    scaled = only("azure", "ScaledObject")["spec"]
    assert (scaled["idleReplicaCount"], scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 2, 8)
    assert "idleReplicaCount" not in only("canary", "ScaledObject")["spec"]
    # Routers hear at once of the first shard.
    assert "--shard=k8s:" in yaml.safe_dump_all(rendered("azure"))


def test_a_pod_monitor_scrapes_the_same_pods() -> None:
    found = only("azure", "PodMonitor")
    (endpoint,) = found["spec"]["podMetricsEndpoints"]
    assert endpoint == {"port": "http", "path": "/metrics", "interval": "15s"}
    router = only("azure", "Deployment")["spec"]["template"]
    assert found["spec"]["selector"]["matchLabels"].items() <= router["metadata"]["labels"].items()
    ports = [port["name"] for part in router["spec"]["containers"] for port in part["ports"]]
    assert endpoint["port"] in ports


def test_prometheus_relabels_what_it_scrapes() -> None:
    (endpoint,) = only("canary", "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["scrapeTimeout"] == "5s"
    assert endpoint["relabelings"] == [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}]
    assert endpoint["metricRelabelings"] == [{"action": "labeldrop", "regex": "instance_id"}]
    (endpoint,) = only("keda-to-zero", "ServiceMonitor")["spec"]["endpoints"]
    assert not {"scrapeTimeout", "relabelings", "metricRelabelings"} & set(endpoint)


@pytest.mark.parametrize(("least", "kind"), [(0, "k8s"), (1, "dns")])
def test_routers_watch_the_api_where_a_pool_scales_from_zero(least: int, kind: str, tmp_path: Path) -> None:
    changed = f"""
shard: {{autoscaling: {{type: keda, minReplicas: {least}}}}}
monitoring: {{prometheusUrl: "http://prometheus:9090"}}
"""
    text = yaml.safe_dump_all(rendered_with(changed, tmp_path))
    assert f"--shard={kind}:" in text
    assert ("kind: Role\n" in text) is (kind == "k8s")
    text = yaml.safe_dump_all(rendered_with(f"{changed}router: {{discovery: dns}}", tmp_path))
    assert "--shard=dns:" in text


def test_objectives_are_of_the_pool_that_the_route_points_at(tmp_path: Path) -> None:
    pool = only("gateway-api", "InferencePool")["metadata"]["name"]
    objectives = [found for found in rendered("gateway-api") if found["kind"] == "InferenceObjective"]
    assert {found["metadata"]["name"]: found["spec"]["priority"] for found in objectives} == {"chat": 10, "batch": -10}
    assert {found["spec"]["poolRef"]["name"] for found in objectives} == {pool}
    (backend,) = only("gateway-api", "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool)


def test_a_pool_that_exists_is_taken_instead_of_a_new_one(tmp_path: Path) -> None:
    changed = "inferencePool: {existing: llm-d-router, endpointPicker: {name: ''}}"
    objects = rendered_with(changed, tmp_path, "gateway-api")
    kinds = [found["kind"] for found in objects]
    assert "InferencePool" not in kinds
    (route,) = (found["spec"] for found in objects if found["kind"] == "HTTPRoute")
    assert route["rules"][0]["backendRefs"] == [
        {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "llm-d-router"}
    ]
    named = {found["spec"]["poolRef"]["name"] for found in objects if found["kind"] == "InferenceObjective"}
    assert named == {"llm-d-router"}
    assert "--vllm-metrics=on" in flags_of("gateway-api", "caravan-router")


def test_models_of_a_folder_are_loaded_on_demand_by_one_pod(tmp_path: Path) -> None:
    serve, router, models, shards = read_flags(flags_of("on-demand", "caravan-router")[1:])
    assert (serve.models_dir, models) == ("/models/gguf", [])
    # Nine tenths of 64 GiB.
    assert serve.models_memory == 64 * 1024 * 9 // 10
    assert shards.items() >= {"ctx_size": 32768, "parallel": 8, "threads": 8, "cache_dir": "/var/cache/caravan"}.items()
    assert (router.state_file, router.shard) == ("/var/lib/caravan/state.db", ())
    pod = pod_of("on-demand", "caravan-router")
    (container,) = pod["containers"]
    assert container["image"] == f"caravan-serve:{__version__}"
    assert container["resources"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": 1}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    # Eight GiB of cached prefixes, with room beside them.
    assert volumes["cache"]["emptyDir"] == {"sizeLimit": "10Gi"}
    kinds = {found["kind"] for found in rendered("on-demand")}
    assert "Service" in kinds
    changed = rendered_with("router: {state: {type: none}}", tmp_path, "on-demand")
    (deployment,) = (found for found in changed if found["kind"] == "Deployment")
    # Two of them at a time would not fit.
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("models.a.file=x", "/models': maxProperties: got 1, want 0"),
        ("onDemand.claimName=", "onDemand needs claimName: a PersistentVolumeClaim with a folder of GGUF files"),
        ("router.autoscaling.enabled=true", "onDemand: each router would load models for itself"),
        ("onDemand.flags.ctx-siz=1", "at '/onDemand/flags': additional properties 'ctx-siz' not allowed"),
        ("router.extraVolumes[0].name=models", "router.extraVolumes: the chart sets models itself"),
    ],
)
def test_what_cannot_be_on_demand_is_refused(change: str, message: str) -> None:
    run = try_tool("helm", "template", "caravan", CHART, "--values", CHART / "ci/on-demand.yaml", "--set", change)
    assert run.returncode != 0
    assert message in run.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("router.autoscaling.enabled=true,router.autoscaling.minReplicas=9", "minReplicas is greater than maxReplicas"),
        ("router.autoscaling.enabled=true,router.autoscaling.cpuUtilization=0", "needs cpuUtilization or metrics"),
        ("router.autoscaling.enabled=true", "3 routers need as many shards, because a shard belongs to one router"),
        (
            "router.autoscaling.enabled=true,shard.replicas=3,router.state.type=claim,sessionAffinity.enabled=true",
            "a router that is taken away would take what its clients have stored along",
        ),
        (
            "shard.autoscaling.triggers[0].type=cron,shard.autoscaling.triggers[0].metadata.start=x",
            "pools.cpu: autoscaling.triggers and scalingModifiers are keda's: set autoscaling.type",
        ),
        (
            (
                "shard.autoscaling.type=keda,monitoring.prometheusUrl=http://p,shard.autoscaling.triggers[0].type=cron,"
                "shard.autoscaling.triggers[0].name=requests,shard.autoscaling.triggers[0].metadata.start=x"
            ),
            "autoscaling.triggers: the chart sets requests itself",
        ),
        ("inferencePool.enabled=true", "inferencePool needs endpointPicker.name, or existing"),
        (
            (
                "inferencePool.enabled=true,inferencePool.existing=x,models.b.file=b,models.b.source.claim.name=b,"
                "models.b.pools.x.replicas=1"
            ),
            "the endpoint picker reads one sample of each metric, so it would see one model only. models has 2",
        ),
        (
            "inferencePool.enabled=true,inferencePool.existing=x,networkPolicy.clients[0].podSelector.a=b",
            "networkPolicy.clients keeps the endpoint picker out",
        ),
        ("gateway.canaries[0].name=x", "at '/gateway/canaries/0': missing property 'weight'"),
    ],
)
def test_what_cannot_work_is_refused(change: str, message: str) -> None:
    run = try_tool("helm", "template", "caravan", CHART, "--values", CHART / "ci/cpu-minimal.yaml", "--set", change)
    assert run.returncode != 0
    assert message in run.stderr
