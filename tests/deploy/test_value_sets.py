"""What the value sets in the chart's folder `ci` are there to show."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.chart import CHART, VALUE_SETS, complaints_about, containers, flags_of, pod_of, render, rendered
from deploy.tools import ROOT, run_tool, try_tool

from caravan_router.kubernetes import ServiceAccount

DOCUMENT = (ROOT / "docs/kubernetes.md").read_text()
VALUES = re.findall(r"^```yaml\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", DOCUMENT, re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
]
FIRST_LINES = [values.partition("\n")[0] for values in VALUES]


def test_openshift_chooses_users_and_groups() -> None:
    for owner, _ in containers(rendered("openshift")):
        pod = owner["spec"]["template"]["spec"]
        assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        assert pod["serviceAccountName"] == "caravan"
    (account,) = (document for document in rendered("openshift") if document["kind"] == "ServiceAccount")
    assert (account["metadata"]["name"], account["automountServiceAccountToken"]) == ("caravan", False)


def test_gpus_come_with_the_groups_of_their_devices_or_by_claims() -> None:
    amd, intel = (pod_of("amd-gpu", f"caravan-qwen-{pool}") for pool in ("amd", "intel"))
    assert amd["securityContext"]["supplementalGroups"] == [44, 109]
    assert amd["containers"][0]["resources"]["limits"]["amd.com/gpu"] == 1
    # A cache of 20 GiB with its room, and a model of 6 GiB, are on emptyDirs.
    assert amd["containers"][0]["resources"]["requests"]["ephemeral-storage"] == f"{(23 + 6) * 1024}Mi"
    assert intel["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "intel-gpu"}]
    assert intel["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
    for pod in (amd, intel):
        assert "--gpu-layers=-1" in pod["containers"][0]["args"]
        assert pod["nodeSelector"]["kubernetes.io/arch"] == "amd64"


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        ("requests.cpu=2,shard.resources.limits.cpu=2500m", ["--threads=2"]),
        ("requests.cpu=500m", ["--threads=1"]),
        ("requests.cpu=16", ["--threads=16"]),
        ("requests.cpu=null", []),
        ("limits.cpu=8,shard.flags.threads=3", ["--threads=3"]),
    ],
)
def test_a_shard_has_threads_for_its_whole_cpus(resources: str, threads: list[str]) -> None:
    text = render(CHART / "ci/cpu-minimal.yaml", "--set", f"shard.resources.{resources}")
    assert re.findall(r"--threads=\d+", text) == threads


def test_a_model_by_name_is_pulled_and_then_served_without_the_hub() -> None:
    pod = pod_of("by-name", "caravan-gemma-cpu")
    (init,), (shard,) = pod["initContainers"], pod["containers"]
    name = "google/gemma-3-4b-it-qat-q4_0-gguf"
    assert [*init["command"], *init["args"]] == ["caravan", "pull", f"hf:{name}"]
    variables = {variable["name"]: variable for variable in init["env"]}
    assert variables["HF_HOME"]["value"] == "/models"
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert {f"--model=hf:{name}", f"--alias={name}"} < set(shard["args"])
    assert shard["env"][1:] == [{"name": "HF_HOME", "value": "/models"}, {"name": "HF_HUB_OFFLINE", "value": "1"}]
    assert f"--expected-model={name}" in flags_of("by-name", "caravan-router")
    (policy,) = (one for one in rendered("by-name") if one["metadata"]["name"] == "caravan-gemma-download")
    assert policy["spec"]["egress"][1]["ports"] == [{"port": 8443, "protocol": "TCP"}]


def test_a_model_with_several_aliases_is_expected_by_the_first() -> None:
    text = render(CHART / "ci/by-name.yaml", "--set", "models.gemma.alias=gemma\\,gpt-4o")
    assert '"--alias=gemma,gpt-4o"' in text
    assert re.findall(r"--expected-model=([^\"]*)", text) == ["gemma"]


def test_zones_are_added_to_nodes() -> None:
    for workload in ("caravan-router", "caravan-smollm-cpu"):
        nodes, zones = pod_of("zones", workload)["topologySpreadConstraints"]
        assert (nodes["topologyKey"], zones["topologyKey"]) == ("kubernetes.io/hostname", "topology.kubernetes.io/zone")
        assert nodes["labelSelector"] == zones["labelSelector"] != {}
    assert pod_of("zones", "caravan-smollm-cpu")["schedulerName"] == "bin-packing"


def test_pods_take_more_containers_variables_and_volumes() -> None:
    router = pod_of("sidecar", "caravan-router")
    assert [container["name"] for container in router["initContainers"]] == ["collector"]
    assert [container["name"] for container in router["containers"]] == ["router", "log-shipper"]
    assert router["containers"][0]["envFrom"] == [{"secretRef": {"name": "tracing"}}]
    shard = pod_of("sidecar", "caravan-smollm-cpu")
    assert shard["containers"][0]["volumeMounts"][-1] == {
        "name": "adapters",
        "mountPath": "/adapters",
        "readOnly": True,
    }
    assert "topologySpreadConstraints" not in shard
    (extra,) = (document for document in rendered("sidecar") if document["metadata"]["name"] == "collector")
    assert all(document["metadata"]["labels"]["team"] == "ml" for document in rendered("sidecar") if document != extra)
    assert extra["metadata"]["namespace"] == "caravan"


def test_with_ipv6_programs_listen_on_addresses_of_it_and_services_have_them() -> None:
    assert "--hostname=::" in flags_of("ipv6", "caravan-router")
    assert {"--address=[::]:50051", "--health-address=[::]:50052"} < set(flags_of("ipv6", "caravan-smollm-cpu"))
    services = [document["spec"] for document in rendered("ipv6") if document["kind"] == "Service"]
    assert [service["ipFamilies"] for service in services] == [["IPv6"], ["IPv6"]]


def test_the_kubelet_asks_no_router_that_demands_certificates() -> None:
    (router,) = pod_of("ipv6", "caravan-router")["containers"]
    assert {router[f"{kind}Probe"]["tcpSocket"]["port"] for kind in ("startup", "liveness", "readiness")} == {"http"}
    assert "--ssl-ca-certs=/etc/caravan/client-ca/ca.crt" in router["args"]


def test_what_clients_store_is_on_a_claim_and_finds_its_router() -> None:
    (router,) = (owner for owner, container in containers(rendered("zones")) if container["name"] == "router")
    assert router["kind"] == "StatefulSet"
    assert router["spec"]["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Retain"
    (mount,) = (
        mount
        for mount in pod_of("zones", "caravan-router")["containers"][0]["volumeMounts"]
        if mount["name"] == "state"
    )
    (flag,) = (flag for flag in flags_of("zones", "caravan-router") if flag.startswith("--state-file="))
    assert flag.startswith(f"--state-file={mount['mountPath']}/")
    by_kind = {
        document["kind"]: document for document in rendered("zones") if document["metadata"]["name"] == "caravan-router"
    }
    assert by_kind["Service"]["spec"]["sessionAffinity"] == "ClientIP"
    hashed = by_kind["Ingress"]["metadata"]["annotations"]["nginx.ingress.kubernetes.io/upstream-hash-by"]
    assert hashed == "$http_authorization$http_x_api_key"
    assert by_kind["HTTPRoute"]["spec"]["rules"][0]["sessionPersistence"]["type"] == "Cookie"


@pytest.mark.parametrize("name", ["two-models", "zones", "gateway-api"])
def test_what_is_published_are_the_routes_of_clients(name: str) -> None:
    published = []
    for document in rendered(name):
        rules = document["spec"]["rules"] if document["kind"] in ("Ingress", "HTTPRoute") else []
        for rule in rules:
            published += [path["path"] for path in rule.get("http", {}).get("paths", [])]
            published += [match["path"]["value"] for match in rule.get("matches", [])]
    routes = json.loads((ROOT / "router/caravan_router/http/openapi.json").read_text())["paths"]
    hidden = {route for route in routes if not any(route == path or route.startswith(f"{path}/") for path in published)}
    assert {route for route in hidden if not route.startswith("/admin/")} == {
        *("/", "/health", "/livez", "/metrics", "/ping", "/readyz"),
        *("/is_sleeping", "/load", "/lora-adapters", "/slots", "/version"),
        *("/docs", "/openapi.json", "/api-doc/openapi.json", "/page/{version}/{folder}/{file}"),
        # Of `caravan serve`; in a cluster, models come and go with their pods.
        *("/models", "/models/load", "/models/unload", "/models/sse"),
    }
    assert not any(path.startswith("/admin") for path in published)


def test_only_a_router_that_watches_endpoint_slices_has_a_token_and_a_role() -> None:
    for name in VALUE_SETS:
        kinds = [document["kind"] for document in rendered(name)]
        expected = 1 if name in ("endpoint-slices", "keda-to-zero", "several-hosts", "azure") else 0
        assert (kinds.count("Role"), kinds.count("RoleBinding")) == (expected, expected)
    objects = {document["kind"]: document for document in rendered("endpoint-slices")}
    assert objects["Role"]["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    binding = objects["RoleBinding"]
    assert binding["roleRef"]["name"] == objects["Role"]["metadata"]["name"] == "caravan-router"
    (subject,) = binding["subjects"]
    pods = {owner["kind"]: owner["spec"]["template"]["spec"] for owner, _ in containers(rendered("endpoint-slices"))}
    router, shard = pods["Deployment"], pods["StatefulSet"]
    assert subject == {"kind": "ServiceAccount", "name": router["serviceAccountName"], "namespace": "caravan"}
    assert [pod["automountServiceAccountToken"] for pod in (router, shard)] == [False, False]
    (token,) = (volume for volume in router["volumes"] if "projected" in volume)
    assert [next(iter(source)) for source in token["projected"]["sources"]] == ["serviceAccountToken", "configMap"]
    (mount,) = (mount for mount in router["containers"][0]["volumeMounts"] if mount["name"] == token["name"])
    assert mount["mountPath"] == str(ServiceAccount().folder)
    assert not any("projected" in volume for volume in shard["volumes"])
    (policy,) = (
        document
        for document in rendered("endpoint-slices")
        if document["kind"] == "NetworkPolicy" and document["metadata"]["name"] == "caravan-router"
    )
    assert {"ports": [{"port": port, "protocol": "TCP"} for port in (443, 6443)]} in policy["spec"]["egress"]


def test_names_that_yaml_reads_as_something_else_stay_texts(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("""
models:
  "7":
    {file: "x #1: y.gguf", alias: "1e3", source: {claim: {name: "8"}}, pools: {"y": {}, "on": {}, "8": {}}}
serviceAccount: {name: "1e3"}
ingress: {enabled: true, host: "*.example.com", tlsSecretName: "no", className: "1"}
apiKeys: {secretName: "12"}
shard: {cache: {type: claim, storageClassName: "1"}}
image: {pullSecrets: ["1"]}
""")
    text = run_tool("helm", "template", "7", CHART, "--namespace", "8", "--values", path)
    objects = list(yaml.safe_load_all(text))
    assert complaints_about([found for found in objects if found]) == []
    sets = [found["spec"] for found in objects if found and found["kind"] == "StatefulSet"]
    labels = [found["selector"]["matchLabels"] for found in sets]
    assert {(found["caravan/model"], found["caravan/pool"]) for found in labels} == {
        ("7", "y"),
        ("7", "on"),
        ("7", "8"),
    }
    assert "--model=/models/x #1: y.gguf" in sets[0]["template"]["spec"]["containers"][0]["args"]


def test_a_service_takes_what_clouds_ask_of_it(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text("""
service:
  type: LoadBalancer
  labels: {team: ml}
  nodePort: 30080
  externalTrafficPolicy: Local
  loadBalancerClass: service.k8s.aws/nlb
  loadBalancerSourceRanges: [10.0.0.0/8]
apiKeys: {secretName: keys}
""")
    text = run_tool("helm", "template", "caravan", CHART, "--values", CHART / "ci/cpu-minimal.yaml", "--values", path)
    services = [found for found in yaml.safe_load_all(text) if found and found["kind"] == "Service"]
    assert complaints_about(services) == []
    (router,) = (found for found in services if found["metadata"]["name"] == "caravan-router")
    assert router["metadata"]["labels"]["team"] == "ml"
    asked = {"externalTrafficPolicy": "Local", "loadBalancerClass": "service.k8s.aws/nlb"}
    assert router["spec"].items() >= (asked | {"loadBalancerSourceRanges": ["10.0.0.0/8"]}).items()
    assert router["spec"]["ports"][0]["nodePort"] == 30080


def test_the_test_pod_may_ask_the_router_where_a_namespace_denies_by_default() -> None:
    (policy,) = (one for one in rendered("cpu-minimal") if one["metadata"]["name"] == "caravan-test")
    assert policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "test"
    dns, router = policy["spec"]["egress"]
    assert [port["port"] for port in dns["ports"]] == [53, 53]
    assert router["to"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"


def test_the_values_of_the_readme_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "values.yaml"
    path.write_text((CHART / "README.md").read_text().split("```yaml\n")[1].split("```")[0])
    assert "caravan-router" in run_tool("helm", "template", "caravan", CHART, "--values", path)


def render_files(*value_files: Path) -> list[dict[str, Any]]:
    flags = [part for path in value_files for part in ("--values", str(path))]
    text = run_tool("helm", "template", "caravan", CHART, "--namespace", "llm", *flags)
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.mark.parametrize("number", range(len(VALUES)), ids=FIRST_LINES)
def test_the_values_render(number: int, tmp_path: Path) -> None:
    # The first block is a whole file of values. The others are parts that are added to such a file.
    whole, part = tmp_path / "values.yaml", tmp_path / "part.yaml"
    whole.write_text(VALUES[0])
    part.write_text(VALUES[number])
    # Models on demand are instead of those of the whole file.
    is_whole = "onDemand:" in VALUES[number]
    objects = render_files(part) if is_whole else render_files(whole, part)
    assert is_whole or any(container["name"] == "shard" for _, container in containers(objects))


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
    made = {f"{found['kind'].lower()}/{found['metadata']['name']}" for found in render_files(values)}
    named = set(re.findall(r"\b(?:service|deployment)/[a-z-]+", DOCUMENT))
    assert named <= made
    for path in re.findall(r"--filename (\S+)", DOCUMENT):
        assert (ROOT / path).exists()
