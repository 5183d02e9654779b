"""A cluster on this host: routers and shards of the chart as pods, which can be replaced as an upgrade does it."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import trustme
import yaml
from deploy.chart import CHART, containers
from deploy.rollout.kubelet import Endpoints, Place, Pod
from deploy.rollout.load import NEW_TOKENS
from deploy.tools import run_tool

from caravan_testing.certificates import write_certificate
from caravan_testing.shard_models import WORDS_MODEL, fetched
from caravan_testing.waiting import DEADLINE_S, wait_until

# All clients together need three shards. A step of 10 ms, so that a reply takes more than a second.
TOY = "{backend: fake, fake-step-ms: 10, parallel: 2}"
VALUES = """
models:
  demo:
    file: {file}
    alias: demo
    source: {{claim: {{name: models}}}}
    pools:
      cpu:
        replicas: {replicas}
        flags: {flags}
        minReadySeconds: {min_ready_s}
mtls: {{mode: secrets, routerSecretName: router-mtls, shardSecretName: shard-mtls}}
router: {{preStopSeconds: 10, state: {{type: {state}}}}}
"""
# Pods have the addresses below it. Port 50051 is the shards'.
_CLAIM, _CLAIM_PORT = 250, 50099


@dataclass(frozen=True, slots=True)
class Network:
    """Loopback addresses with a common prefix, which are this cluster's until ``claim`` is closed."""

    prefix: str
    claim: socket.socket


def claim_network() -> Network:
    """Claim addresses that no cluster of another process has. Pods listen on fixed ports, so these must differ."""
    for number in range(9, 255):
        prefix = f"127.0.{number}"
        claim = socket.socket()
        try:
            claim.bind((f"{prefix}.{_CLAIM}", _CLAIM_PORT))
        except OSError:
            claim.close()
        else:
            return Network(prefix, claim)
    raise AssertionError("all networks are taken")


def shards_of(router: str) -> list[dict[str, Any]]:
    """Return the shards that a router has, each with the sequences that run there: none if the router has ended."""
    with contextlib.closing(http.client.HTTPConnection(router, 3000, timeout=DEADLINE_S)) as connection:
        try:
            connection.request("GET", "/admin/prefixes")
            return list(json.loads(connection.getresponse().read())["shards"])
        except OSError:
            return []


@dataclass(frozen=True, slots=True)
class Size:
    """Shards of a cluster, the seconds in which routers learn of a change by DNS, and where these keep their state."""

    replicas: int
    flags: str = TOY
    min_ready_s: int = 0
    lag_s: float = 0.0
    state: str = "none"


class Cluster:
    """A router and shards of the chart, as pods on this host."""

    def __init__(self, folder: Path, size: Size) -> None:
        self._folder = folder
        self._size = size
        self.upgrade(fetched(WORDS_MODEL).name)
        authority = trustme.CA()
        for component, names in {"router": ("caravan-router",), "shard": ("caravan-shard",)}.items():
            mount = folder / component
            mount.mkdir()
            made = write_certificate(folder, component, names, authority, authority)
            for name, path in {"tls.crt": made.chain, "tls.key": made.key, "ca.crt": made.authorities}.items():
                Path(path).rename(mount / name)
        self._network = claim_network()
        self._addresses = iter(f"{self._network.prefix}.{number}" for number in range(1, _CLAIM))
        self.routers = Endpoints(lag_s=1.0)
        self.shards = Endpoints(lag_s=size.lag_s)
        self._listed = folder / "shards"
        self._listed.write_text("")
        self.pods: list[Pod] = []

    def upgrade(self, file: str) -> None:
        """Let pods that start from now on be those of the chart with this file of the model."""
        values = self._folder / "values.yaml"
        values.write_text(VALUES.format(file=file, **asdict(self._size)))
        text = run_tool("helm", "template", "caravan", CHART, "--namespace", "caravan", "--values", values)
        objects = [document for document in yaml.safe_load_all(text) if document]
        self._owners = {container["name"]: owner for owner, container in containers(objects)}

    def start_pod(self, component: str, name: str) -> Pod:
        endpoints = self.routers if component == "router" else self.shards
        place = Place(
            name=name,
            address=next(self._addresses),
            replaced={
                "/etc/caravan/mtls": str(self._folder / component),
                "/models": str(WORDS_MODEL.parent),
                "/var/lib/caravan": str(self._folder),
                "dns:caravan-demo-cpu.caravan.svc:50051": f"file:{self._listed}",
            },
        )
        pod = Pod(self._owners[component], place, self._folder / f"{name}.log", self._publish)
        self.pods.append(pod)
        endpoints.pods.append(pod)
        return pod

    def roll_out_shards(self, shards: Sequence[Pod], before: Callable[[Pod], None]) -> None:
        """Replace the shards as a StatefulSet does: the highest number first, one at a time, each after ``before``."""
        for shard in reversed(shards):
            before(shard)
            shard.terminate()
            new = self.start_pod("shard", shard.place.name)
            until_ready(new)
            # A pod that was not ready for so long is not available, and the next one stays.
            time.sleep(self._size.min_ready_s)

    def until_it_runs(self, shard: Pod) -> None:
        """Wait until a sequence runs here that has begun and is not near its end, 10 s at most."""
        place = f"{shard.place.address}:50051"
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            for router in self.routers.known():
                here = [found["running"] for found in shards_of(router) if found["shard"] == place]
                if any(
                    NEW_TOKENS // 10 < sequence["tokens"] < NEW_TOKENS // 2
                    for sequences in here
                    for sequence in sequences
                ):
                    return
            time.sleep(0.02)

    def drained_sequences(self) -> int:
        """Return how many sequences ran on the shards when these were told to end."""
        lines = (json.loads(line) for log in self._folder.glob("*.log") for line in log.read_text().splitlines())
        return sum(line.get("sequences", 0) for line in lines if line["message"] == "draining")

    def close(self) -> None:
        """End all pods at once, and give up their addresses."""
        for pod in self.pods:
            pod.kill()
        self._network.claim.close()

    def refresh_until(self, ended: threading.Event) -> None:
        """Tell routers what they know of shards by now, again and again."""
        while not ended.wait(0.2):
            self._publish()

    def _publish(self) -> None:
        for endpoints in (self.routers, self.shards):
            endpoints.refresh()
        new = self._listed.with_suffix(f".{threading.get_ident()}")
        new.write_text("".join(f"{address}:50051\n" for address in self.shards.known()))
        new.rename(self._listed)


def until_ready(pod: Pod) -> None:
    wait_until(lambda: pod.ready, f"{pod.place.name} is ready")


@contextlib.contextmanager
def cluster(folder: Path, size: Size) -> Iterator[Cluster]:
    made = Cluster(folder, size)
    ended = threading.Event()
    # What is known changes with time alone, too.
    refreshing = threading.Thread(target=made.refresh_until, args=(ended,))
    refreshing.start()
    try:
        yield made
    finally:
        ended.set()
        refreshing.join()
        made.close()
        for log in sorted(folder.glob("*.log")):
            print(f"--- {log.name}", *log.read_text().splitlines()[-25:], sep="\n")
