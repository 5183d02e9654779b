"""The chart on a real cluster, in a namespace of its own: see "Test on a cluster" in docs/kubernetes.md."""

import contextlib
import http.client
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from deploy.chart import CHART, VALUE_SETS
from deploy.cluster.kubectl import Kubectl
from deploy.rollout.load import Load
from deploy.tools import run_tool

IMAGES = os.environ.get("CARAVAN_CLUSTER_IMAGES", "")
MORE_VALUES = os.environ.get("CARAVAN_CLUSTER_VALUES", "")
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
if "KUBECONFIG" not in os.environ:
    pytest.skip("KUBECONFIG names no cluster", allow_module_level=True)

SHARDS, ROUTER = "statefulset/caravan-toy-cpu", "deployment/caravan-router"
SHARD_PODS = "app.kubernetes.io/component=shard"
REPLICAS = 3
IPV6 = "IPv6"
VALUES = f"""
models:
  toy:
    file: toy.gguf
    source: {{claim: {{name: models}}}}
    pools:
      cpu: {{replicas: {REPLICAS}}}
shard:
  minReadySeconds: 40
  flags: {{backend: fake, fake-step-ms: 10, parallel: 2}}
  resources: {{requests: {{cpu: 100m, memory: 256Mi}}}}
router:
  resources: {{requests: {{cpu: 100m, memory: 256Mi}}}}
"""
# The toy model reads no file, but its pods mount the claim.
CLAIM = {
    "apiVersion": "v1",
    "kind": "PersistentVolumeClaim",
    "metadata": {"name": "models"},
    "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Mi"}}},
}


class Forwarded:
    """A router behind a forwarded port."""

    def known(self) -> tuple[str, ...]:
        return ("127.0.0.1",)


def helm(kubectl: Kubectl, *arguments: str | Path) -> str:
    return run_tool("helm", *arguments, "--namespace", kubectl.namespace)


@pytest.fixture(scope="module")
def kubectl() -> Iterator[Kubectl]:
    """A new namespace, which is deleted with all in it at the end."""
    made = Kubectl(f"caravan-test-{secrets.token_hex(4)}")
    made.run("create", "namespace", made.namespace)
    made.run("label", "namespace", made.namespace, "pod-security.kubernetes.io/enforce=restricted")
    try:
        yield made
    finally:
        made.run("delete", "namespace", made.namespace, "--timeout=300s")


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of helm for the release, whose images CARAVAN_CLUSTER_IMAGES names: registry/folder:tag."""
    registry, _, tag = IMAGES.rpartition(":")
    assert registry, f"CARAVAN_CLUSTER_IMAGES must be registry/folder:tag. Given: {IMAGES!r}"
    path = tmp_path_factory.mktemp("values") / "values.yaml"
    path.write_text(VALUES)
    more = ["--values", MORE_VALUES] if MORE_VALUES else []
    return ["--values", str(path), *more, "--set", f"image.registry={registry}", "--set-string", f"image.tag={tag}"]


@pytest.fixture(scope="module")
def release(kubectl: Kubectl, flags: list[str]) -> Iterator[Kubectl]:
    """The installed chart with toy shards, all of whose pods are ready. At the end nothing of it may be left."""
    kubectl.run("apply", "--filename", "-", stdin=json.dumps(CLAIM))
    helm(kubectl, "install", "caravan", CHART, *flags)
    try:
        for workload in (SHARDS, ROUTER):
            kubectl.until_rolled_out(workload)
        yield kubectl
    finally:
        helm(kubectl, "uninstall", "caravan", "--wait", "--timeout", "5m")
    kinds = "deployments,statefulsets,services,networkpolicies,poddisruptionbudgets,serviceaccounts,roles"
    left = kubectl.run("get", kinds, "--selector", "app.kubernetes.io/instance=caravan", "--output", "name")
    assert left.split() == []


@contextlib.contextmanager
def load(kubectl: Kubectl) -> Iterator[tuple[Load, int]]:
    """Ask the router until the end of the block; nothing may have failed then. Yield the load and the router's port."""
    with kubectl.forwarding(ROUTER, 3000) as port:
        running = Load(Forwarded(), port)
        running.start()
        try:
            running.until_each_is_answered()
            yield running, port
            running.until_each_is_answered()
        finally:
            running.stop()
    assert running.failures == []


@pytest.mark.parametrize("name", VALUE_SETS)
def test_the_api_server_takes_every_object_of_a_value_set(name: str, kubectl: Kubectl) -> None:
    text = helm(kubectl, "template", "caravan", CHART, "--values", CHART / f"ci/{name}.yaml", "--skip-tests")
    if f"ipFamilies: [{IPV6}]" in text and not kubectl.has_family(IPV6):
        pytest.skip("the cluster has no IPv6 addresses")
    unknown = kubectl.dry_run([document for document in yaml.safe_load_all(text) if document])
    print(f"{name}: not judged, since the cluster does not know these kinds: {', '.join(unknown) or 'none'}")


def test_shards_are_replaced_under_load_without_a_failed_request(release: Kubectl) -> None:
    with load(release):
        release.run("rollout", "restart", SHARDS)
        release.until_rolled_out(SHARDS)


def test_a_shard_that_is_evicted_hands_its_requests_over(release: Kubectl) -> None:
    with load(release):
        release.evict(release.pods(SHARD_PODS)[-1])
        release.until_rolled_out(SHARDS)


def test_a_shard_that_an_operator_drains_is_started_again(release: Kubectl) -> None:
    with load(release) as (_, port), contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request("GET", "/admin/shards")
        shard, *others = json.loads(connection.getresponse().read())["shards"]
        assert len(others) == REPLICAS - 1
        connection.request("POST", f"/admin/shards/{shard['address']}/drain")
        assert connection.getresponse().status == 200
        release.until_rolled_out(SHARDS)


def test_a_pool_keeps_its_shards_when_keda_takes_over(release: Kubectl, flags: list[str]) -> None:
    if "keda.sh/v1alpha1/ScaledObject" not in release.kinds():
        pytest.skip("the cluster has no KEDA")
    scaling = "models.toy.pools.cpu.autoscaling"
    prometheus = "monitoring.prometheusUrl=http://prometheus.invalid:9090"
    more = ["--set", f"{scaling}.type=keda,{scaling}.minReplicas=1,{scaling}.maxReplicas=4,{prometheus}"]
    helm(release, "upgrade", "caravan", CHART, *flags, *more)
    assert release.replicas(SHARDS) == REPLICAS
