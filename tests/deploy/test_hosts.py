"""Shards of several hosts: groups of LeaderWorkerSet whose leader uses its workers, and nothing else does."""

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.chart import CHART, flags_of, pod_of, rendered
from deploy.tools import run_tool, try_tool

from caravan_shard.config import ShardConfig
from caravan_shard.placement_flags import parse_rpc_servers
from caravan_shard.rpc_server import rpc_server_parser
from caravan_testing.waiting import DEADLINE_S

LEADERS, WORKERS = "caravan-large-gpu", "caravan-large-gpu-workers"
VALUES = CHART / "ci/several-hosts.yaml"


def group() -> dict[str, Any]:
    (found,) = (document for document in rendered("several-hosts") if document["kind"] == "LeaderWorkerSet")
    return found


def policy(name: str) -> dict[str, Any]:
    (found,) = (
        document["spec"]
        for document in rendered("several-hosts")
        if document["kind"] == "NetworkPolicy" and document["metadata"]["name"] == name
    )
    return dict(found)


def test_a_leader_uses_the_workers_of_its_group_by_the_names_that_the_controller_gives_them() -> None:
    name = group()["metadata"]["name"]
    (flag,) = (flag for flag in flags_of("several-hosts", LEADERS) if flag.startswith("--rpc="))
    # Leaders are called NAME-0, NAME-1 and so on, their workers NAME-0-1 and so on, in the domain of a Service NAME.
    servers = flag.removeprefix("--rpc=").replace("$(POD_NAME)", f"{name}-1")
    assert parse_rpc_servers(servers) == [f"{name}-1-{number}.{name}.caravan.svc:50053" for number in (1, 2)]
    assert group()["spec"]["leaderWorkerTemplate"]["size"] == 3
    services = [found["metadata"]["name"] for found in rendered("several-hosts") if found["kind"] == "Service"]
    assert name not in services, "the controller makes it, and leaves one that there is as it is"
    (await_workers,) = pod_of("several-hosts", LEADERS)["initContainers"]
    assert f"--rpc={await_workers['args'][1]}" == flag


def test_a_lost_worker_is_a_lost_shard() -> None:
    assert group()["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    (shard,) = pod_of("several-hosts", LEADERS)["containers"]
    assert {"name": "GGML_NO_BACKTRACE", "value": "1"} in shard["env"]


def test_a_worker_takes_its_flags_and_the_resources_of_a_host() -> None:
    (worker,) = pod_of("several-hosts", WORKERS)["containers"]
    (shard,) = pod_of("several-hosts", LEADERS)["containers"]
    assert worker["command"] == ["caravan", "rpc-server"]
    taken = rpc_server_parser().parse_args(worker["args"])
    assert (taken.address, taken.threads, taken.device) == ("0.0.0.0:50053", 16, "")
    assert worker["resources"] == shard["resources"]
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert worker["image"] == shard["image"], "both need the same llama.cpp"
    text = run_tool("helm", "template", "caravan", CHART, "--values", VALUES, "--set", "models.large.pools.gpu.gpus=0")
    assert "--device=none" in text


def test_only_leaders_reach_workers_and_workers_reach_nothing() -> None:
    leaders, workers = (pod_labels(name) for name in (LEADERS, WORKERS))
    own = policy(WORKERS)
    assert own["podSelector"]["matchLabels"].items() <= workers.items()
    assert not own["podSelector"]["matchLabels"].items() <= leaders.items()
    assert set(own["policyTypes"]) == {"Ingress", "Egress"}
    assert "egress" not in own
    (rule,) = own["ingress"]
    (peer,) = rule["from"]
    assert rule["ports"] == [{"port": "rpc", "protocol": "TCP"}]
    assert peer["podSelector"]["matchLabels"].items() <= leaders.items()
    assert not peer["podSelector"]["matchLabels"].items() <= workers.items()
    # No other policy lets anyone in.
    for document in rendered("several-hosts"):
        if document["kind"] == "NetworkPolicy" and document["metadata"]["name"] != WORKERS:
            assert not document["spec"]["podSelector"]["matchLabels"].items() <= workers.items()
    dns, rpc = policy("caravan-large-gpu-leaders")["egress"]
    assert [port["port"] for port in dns["ports"]] == [53, 53]
    assert rpc["to"][0]["podSelector"]["matchLabels"].items() <= workers.items()


def pod_labels(name: str) -> dict[str, str]:
    part = "workerTemplate" if name == WORKERS else "leaderTemplate"
    labels: dict[str, str] = group()["spec"]["leaderWorkerTemplate"][part]["metadata"]["labels"]
    return labels


def test_the_hosts_of_a_shard_are_spread_together() -> None:
    for name in (LEADERS, WORKERS):
        (spread,) = pod_of("several-hosts", name)["topologySpreadConstraints"]
        for labels in (pod_labels(LEADERS), pod_labels(WORKERS)):
            assert spread["labelSelector"]["matchLabels"].items() <= labels.items()


def test_a_worker_is_ready_once_it_listens_and_the_leader_starts_then() -> None:
    """Both programs run here, with the port that the chart names."""
    (await_workers,) = pod_of("several-hosts", LEADERS)["initContainers"]
    (worker,) = pod_of("several-hosts", WORKERS)["containers"]
    probe = worker["readinessProbe"]["exec"]["command"][2]
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        probe = probe.replace("C385", f"{port:04X}")
        assert f"{50053:04X}" == "C385"
        assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 1
        command = [sys.executable, "-u", "-c", await_workers["args"][0], f"127.0.0.1:{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as waiting:
            assert waiting.stdout is not None
            assert re.match(r"waiting for 127\.0\.0\.1:\d+: .*refused", waiting.stdout.readline())
            server.listen()
            assert subprocess.run([sys.executable, "-c", probe], check=False).returncode == 0
            assert waiting.wait(DEADLINE_S) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("networkPolicy.enabled=false,mtls.mode=cert-manager", "pools.gpu.hosts: anyone who reaches a worker may read"),
        ("ipFamily=IPv6", "pools.gpu.hosts: llama.cpp's rpc-servers have IPv4 addresses only. ipFamily is IPv6"),
        ("shard.cache.type=claim", "pools.gpu.hosts: a group of hosts cannot have its own claims"),
        ("models.large.pools.gpu.flags.rpc=x:1", "pools.gpu.hosts: the chart sets the flag rpc itself"),
        ("shard.env[0].name=GGML_NO_BACKTRACE", "pools.gpu.env: the chart sets GGML_NO_BACKTRACE itself"),
        ("fullnameOverride=a234567890123456789012345678901234567890", "and with hosts it may have 46: shorten models."),
        ("models.large.pools.gpu.hosts=0", "at '/models/large/pools/gpu/hosts': minimum: got 0, want 1"),
    ],
)
def test_what_groups_of_hosts_cannot_have_is_refused(change: str, message: str) -> None:
    run = try_tool("helm", "template", "caravan", CHART, "--values", VALUES, "--set", change)
    assert run.returncode != 0
    assert message in run.stderr


def test_a_shard_takes_the_flag_of_its_workers(tmp_path: Path) -> None:
    config = ShardConfig(model="x", rpc="a-0-1.a.n.svc:50053,a-0-2.a.n.svc:50053", gpu_layers=-1)
    assert len(config.rpc_servers) == 2
    text = run_tool("helm", "template", "c", CHART, "--values", VALUES, "--set", "models.large.pools.gpu.hosts=1")
    kinds = {document["kind"] for document in yaml.safe_load_all(text) if document}
    assert "LeaderWorkerSet" not in kinds
