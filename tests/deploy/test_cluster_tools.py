"""What `make test-cluster` asks kubectl, on a program that stands in for it."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from deploy.cluster.kubectl import Kubectl, KubectlError

# It notes its words and its input, and answers by the first word that it knows.
PROGRAM = """#!{python}
import json, pathlib, sys, time
folder = pathlib.Path({folder!r})
words = sys.argv[1:]
assert words[:2] == ["--namespace", "ns"], words
stdin = "" if "port-forward" in words else sys.stdin.read()
with (folder / "calls").open("a") as calls:
    calls.write(json.dumps([words[2:], stdin]) + chr(10))
for name, (code, text) in json.loads((folder / "answers").read_text()).items():
    if name in words:
        sys.stdout.write(text) if code == 0 else sys.stderr.write(text)
        sys.stdout.flush()
        if "port-forward" in words and code == 0:
            time.sleep(60)
        sys.exit(code)
"""
API_RESOURCES = """\
configmaps      cm      v1                  true    ConfigMap
namespaces      ns      v1                  false   Namespace
deployments     deploy  apps/v1             true    Deployment
endpointslices          discovery.k8s.io/v1 true    EndpointSlice
"""


class FakeKubectl:
    """The program, what it answers, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        program = folder / "kubectl"
        program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        self.kubectl = Kubectl("ns", str(program))
        self.answer()

    def answer(self, **texts: str | tuple[int, str]) -> None:
        """Let the program answer to words; ``texts``: what it prints, or its exit status and its complaint."""
        answers = {name.replace("_", "-"): (0, text) if isinstance(text, str) else text for name, text in texts.items()}
        (self._folder / "answers").write_text(json.dumps(answers))

    @property
    def calls(self) -> list[tuple[list[str], str]]:
        return [(words, stdin) for words, stdin in map(json.loads, (self._folder / "calls").read_text().splitlines())]


@pytest.fixture
def fake(tmp_path: Path) -> FakeKubectl:
    return FakeKubectl(tmp_path)


def test_the_api_server_judges_the_kinds_that_it_knows(fake: FakeKubectl) -> None:
    fake.answer(api_resources=API_RESOURCES)
    objects = [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}},
        {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": "b"}},
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}},
    ]
    assert fake.kubectl.dry_run(objects) == ["ScaledObject"]
    _, (words, stdin) = fake.calls
    assert words[0] == "apply"
    assert {"--server-side", "--dry-run=server", "--validate=strict"} <= set(words)
    assert list(yaml.safe_load_all(stdin)) == [objects[0], objects[2]]


SERVICES = "services        svc     v1                  true    Service\n"


def test_a_cluster_without_ipv6_is_known_by_what_it_refuses(fake: FakeKubectl) -> None:
    fake.answer(apply="", api_resources=SERVICES)
    assert fake.kubectl.has_family("IPv6")
    refused = 'Service "family" is invalid: spec.ipFamilies[0]: Invalid value: "IPv6": not configured on this cluster'
    fake.answer(apply=(1, refused), api_resources=SERVICES)
    assert not fake.kubectl.has_family("IPv6")
    fake.answer(apply=(1, "error: connection refused"), api_resources=SERVICES)
    with pytest.raises(KubectlError, match="connection refused"):
        fake.kubectl.has_family("IPv6")


def test_what_kubectl_complains_about_is_told(fake: FakeKubectl) -> None:
    fake.answer(apply=(1, "error: unknown field spec.replica"), api_resources=API_RESOURCES)
    with pytest.raises(KubectlError, match=r"(?s)kubectl --namespace ns apply .*error: unknown field spec.replica"):
        fake.kubectl.dry_run([{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}}])


def test_pods_that_are_ending_are_left_out(fake: FakeKubectl) -> None:
    items = [{"metadata": {"name": "b"}}, {"metadata": {"name": "a"}}, {"metadata": {"name": "c"}}]
    items[2]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    fake.answer(pods=json.dumps({"items": items}))
    assert fake.kubectl.pods("x=y") == ["a", "b"]
    assert fake.calls[-1][0] == ["get", "pods", "--selector", "x=y", "--output", "json"]


def test_an_eviction_goes_to_the_subresource_of_the_pod(fake: FakeKubectl) -> None:
    fake.kubectl.evict("a-0")
    ((words, stdin),) = fake.calls
    assert words == ["create", "--raw", "/api/v1/namespaces/ns/pods/a-0/eviction", "--filename", "-"]
    eviction = json.loads(stdin)
    assert (eviction["apiVersion"], eviction["kind"]) == ("policy/v1", "Eviction")
    assert eviction["metadata"] == {"name": "a-0", "namespace": "ns"}


def test_replicas_are_a_number(fake: FakeKubectl) -> None:
    fake.answer(get="3")
    assert fake.kubectl.replicas("statefulset/a") == 3


def test_a_port_is_forwarded_until_the_block_ends(fake: FakeKubectl) -> None:
    fake.answer(port_forward="Forwarding from 127.0.0.1:41234 -> 3000\nForwarding from [::1]:41234 -> 3000\n")
    with fake.kubectl.forwarding("deployment/a", 3000) as port:
        assert port == 41234
    assert fake.calls[-1][0] == ["port-forward", "deployment/a", ":3000"]


def test_a_port_that_cannot_be_forwarded_is_told(fake: FakeKubectl) -> None:
    fake.answer(port_forward=(1, "error: no pods"))
    with (
        pytest.raises(KubectlError, match="port-forward deployment/a :3000"),
        fake.kubectl.forwarding("deployment/a", 3000),
    ):
        pass
