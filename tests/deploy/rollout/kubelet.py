"""A kubelet and a kube-proxy on this host: pods are processes with loopback addresses of their own.

A pod runs the container that a manifest has for it: its flags, its probes, its preStop hook and its grace period. What
the flags cannot have here is replaced: addresses to listen on, folders of volumes, and names of Services.
"""

import contextlib
import http.client
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TICK_S = 0.1
_PROGRAMS = Path(sys.executable).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a pod finds on its node: its name and address, and a replacement for each text of its flags."""

    name: str
    address: str
    replaced: Mapping[str, str]


class Pod:
    """One pod of a Deployment or StatefulSet. `ready` is what its readiness probe says."""

    def __init__(self, owner: dict[str, Any], place: Place, log: Path, on_change: Callable[[], None]) -> None:
        """Start it; ``on_change`` is called when `ready` may have changed."""
        self.place = place
        self.ready = False
        self.restarts = 0
        spec = owner["spec"]["template"]["spec"]
        (self._container,) = spec["containers"]
        self._grace_s: float = spec["terminationGracePeriodSeconds"]
        self._on_change = on_change
        self._ending = threading.Event()
        self._log = log.open("ab")
        self._process = self._start()
        self._probing = threading.Thread(target=self._probe, daemon=True)
        self._probing.start()

    def _start(self) -> subprocess.Popen[bytes]:
        replaced = {
            "$(POD_NAME)": self.place.name,
            "$(POD_IP)": self.place.address,
            "0.0.0.0": self.place.address,
            **self.place.replaced,
        }
        words = [_PROGRAMS / f"caravan-{self._container['name']}"]
        for word in self._container["args"]:
            for text, replacement in replaced.items():
                word = word.replace(text, replacement)
            words.append(word)
        return subprocess.Popen(words, stdout=self._log, stderr=self._log)

    def terminate(self) -> float:
        """End it as a deletion does, and return the seconds that took. Raises if it had to be killed or failed."""
        began = time.monotonic()
        self._ending.set()
        self._note(ready=False)
        time.sleep(self._container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0))
        self._process.send_signal(signal.SIGTERM)
        code = self._process.wait(self._grace_s - (time.monotonic() - began))
        assert code == 0, f"{self.place.name} ended with {code}"
        return time.monotonic() - began

    def kill(self) -> None:
        """End its process at once."""
        self._ending.set()
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _note(self, *, ready: bool) -> None:
        self.ready = ready and not self._ending.is_set()
        self._on_change()

    def _probe(self) -> None:
        """Probe until the pod ends: first startup, then liveness and readiness together."""
        if not self._starts():
            self.restarts += 1
        failures = dict.fromkeys(("readinessProbe", "livenessProbe"), 0)
        due = dict.fromkeys(failures, 0.0)
        while not self._ending.wait(_TICK_S):
            for kind in failures:
                probe = self._container[kind]
                if time.monotonic() < due[kind]:
                    continue
                due[kind] = time.monotonic() + probe["periodSeconds"]
                passed = self._passes(probe)
                failures[kind] = 0 if passed else failures[kind] + 1
                if kind == "readinessProbe" and (passed or failures[kind] >= probe["failureThreshold"]):
                    self._note(ready=passed)
                elif failures[kind] >= probe["failureThreshold"] and not self._ending.is_set():
                    self.restarts += 1

    def _starts(self) -> bool:
        """Probe as long as Kubernetes would, but more often. True also if the pod ends meanwhile."""
        probe = self._container["startupProbe"]
        until = time.monotonic() + probe["failureThreshold"] * probe["periodSeconds"]
        while not self._passes(probe):
            if time.monotonic() > until:
                return False
            if self._ending.wait(min(probe["periodSeconds"], 0.5)):
                return True
        return True

    def _passes(self, probe: dict[str, Any]) -> bool:
        timeout_s = probe["timeoutSeconds"]
        if "grpc" in probe:
            target = f"{self.place.address}:{probe['grpc']['port']}"
            request = health_pb2.HealthCheckRequest(service=probe["grpc"].get("service", ""))
            with grpc.insecure_channel(target) as channel, contextlib.suppress(grpc.RpcError):
                reply = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
                return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
            return False
        ports = {port["name"]: port["containerPort"] for port in self._container["ports"]}
        connection = http.client.HTTPConnection(self.place.address, ports[probe["httpGet"]["port"]], timeout=timeout_s)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", probe["httpGet"]["path"])
            return 200 <= connection.getresponse().status < 400
        return False


class Endpoints:
    """The addresses of a Service's pods that are ready, as others know them ``lag_s`` seconds later."""

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        self._lock = threading.Lock()
        self._history: list[tuple[float, tuple[str, ...]]] = [(0.0, ())]
        self.pods: list[Pod] = []

    def refresh(self) -> None:
        """Note what is ready now."""
        with self._lock:
            now = tuple(pod.place.address for pod in self.pods if pod.ready)
            if now != self._history[-1][1]:
                self._history.append((time.monotonic(), now))

    def known(self) -> tuple[str, ...]:
        """Return the addresses that a client knows now."""
        with self._lock:
            return next(found for since, found in reversed(self._history) if since <= time.monotonic() - self._lag_s)
