"""What the tests ask of a real cluster, by kubectl: the one that the variable KUBECONFIG names."""

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

_TIMEOUT_S = 600


class KubectlError(Exception):
    """kubectl failed; the message has what it said."""


@dataclass(frozen=True, slots=True)
class Kubectl:
    """Runs ``program`` in one namespace."""

    namespace: str
    program: str = "kubectl"

    def run(self, *arguments: str, stdin: str = "") -> str:
        """Return what kubectl prints. Raises KubectlError."""
        words = [self.program, "--namespace", self.namespace, *arguments]
        done = subprocess.run(words, input=stdin, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise KubectlError(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def kinds(self) -> set[str]:
        """Return the kinds that the cluster knows, such as "v1/Pod"."""
        lines = self.run("api-resources", "--no-headers").splitlines()
        # NAME, SHORTNAMES if there are any, APIVERSION, NAMESPACED, KIND
        return {f"{words[-3]}/{words[-1]}" for line in lines if len(words := line.split()) >= 4}

    def dry_run(self, objects: Sequence[dict[str, Any]]) -> list[str]:
        """Let the API server judge ``objects`` without making them. Return the kinds that it does not know.

        Raises KubectlError if it refuses one.
        """
        kinds = self.kinds()
        known = [one for one in objects if f"{one['apiVersion']}/{one['kind']}" in kinds]
        flags = ("--server-side", "--dry-run=server", "--validate=strict", "--field-manager=caravan-test")
        self.run("apply", *flags, "--filename", "-", stdin=yaml.safe_dump_all(known))
        return sorted({one["kind"] for one in objects} - {one["kind"] for one in known})

    def has_family(self, family: str) -> bool:
        """Whether Services of the cluster can have addresses of this family, IPv4 or IPv6. Raises KubectlError."""
        spec = {"ports": [{"port": 80}], "ipFamilyPolicy": "SingleStack", "ipFamilies": [family]}
        service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "family"}, "spec": spec}
        try:
            self.dry_run([service])
        except KubectlError as error:
            if "not configured on this cluster" in str(error):
                return False
            raise
        return True

    def pods(self, selector: str) -> list[str]:
        """Return the names of the pods that ``selector`` chooses and that are not ending, in order."""
        items = json.loads(self.run("get", "pods", "--selector", selector, "--output", "json"))["items"]
        return sorted(pod["metadata"]["name"] for pod in items if "deletionTimestamp" not in pod["metadata"])

    def replicas(self, workload: str) -> int:
        """Return how many pods a workload such as "statefulset/a" shall have."""
        return int(self.run("get", workload, "--output", "jsonpath={.spec.replicas}"))

    def until_rolled_out(self, workload: str) -> None:
        """Wait until all pods of ``workload`` are new and available."""
        self.run("rollout", "status", workload, f"--timeout={_TIMEOUT_S - 30}s")

    def evict(self, pod: str) -> None:
        """Evict a pod as a drain of its node does. Raises KubectlError, also if a budget does not allow it now."""
        eviction = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": pod, "namespace": self.namespace},
        }
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction"
        self.run("create", "--raw", path, "--filename", "-", stdin=json.dumps(eviction))

    @contextlib.contextmanager
    def forwarding(self, target: str, port: int) -> Iterator[int]:
        """Forward a port of this host to ``port`` of ``target`` until the end of the block, and yield it."""
        words = [self.program, "--namespace", self.namespace, "port-forward", target, f":{port}"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        with process.stdout:
            said = process.stdout.readline()
            # It writes a line for each connection, which somebody has to read.
            reading = threading.Thread(target=process.stdout.read)
            reading.start()
            try:
                if (found := re.search(r"127\.0\.0\.1:(\d+)", said)) is None:
                    raise KubectlError(f"{' '.join(words)}\n{said}")
                yield int(found[1])
            finally:
                process.terminate()
                process.wait(30)
                reading.join(30)
