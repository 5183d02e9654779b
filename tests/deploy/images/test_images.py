"""The images of router and shard, run under runc. `make test-images` needs root, and what `make images` has built."""

import contextlib
import http.client
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from deploy.images.container import Container, buildah, container, image_config

import caravan_proto
from caravan_testing.certificates import write_certificate
from caravan_testing.programs import kept_ports
from caravan_testing.shard_models import DEMO_MODEL
from caravan_testing.waiting import DEADLINE_S, wait_until

ROUTER = f"localhost/caravan-router:{caravan_proto.__version__}"
SHARD = f"localhost/caravan-shard:{caravan_proto.__version__}"
# Kubernetes kills a pod that has not ended by then. The programs' own limits are lower.
GRACE_S = 120.0
DRAIN_S = 100
LONG_OUTPUT = 50

pytestmark = pytest.mark.images


class Service:
    """A router and a shard in containers, which speak mutual TLS over TCP."""

    def __init__(self, router: Container, shard: Container, port: int) -> None:
        self.router, self.shard, self.port = router, shard, port

    def wait_until_healthy(self) -> None:
        wait_until(lambda: self.status("/health"), "the router is healthy", lambda found: found == 200)

    def status(self, path: str) -> int:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)) as connection:
            try:
                connection.request("GET", path)
                return connection.getresponse().status
            except ConnectionRefusedError:
                return 0

    def stream(self, tokens: int) -> Iterator[dict[str, object]]:
        """Ask for ``tokens`` tokens and yield the events as they come."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)) as connection:
            parameters = {"max_new_tokens": tokens, "min_new_tokens": tokens}
            body = {"inputs": "The capital of France is", "parameters": parameters}
            connection.request("POST", "/generate_stream", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            for line in response:
                if line.startswith(b"data:"):
                    yield json.loads(line.removeprefix(b"data:"))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Service]:
    """Start a shard and a router, and wait until they serve."""
    certificates = folder / "tls"
    certificates.mkdir(mode=0o755)
    authority = trustme.CA()
    for holder in ("router", "shard"):
        write_certificate(certificates, holder, ("127.0.0.1",), authority, authority)
    with kept_ports(3) as ports:
        yield from running_on(folder, certificates, ports)


def running_on(folder: Path, certificates: Path, ports: list[int]) -> Iterator[Service]:
    shard_port, health_port, http_port = ports
    shard_flags = ["--model", "/models/model.gguf", "--address", f"0.0.0.0:{shard_port}"]
    shard_flags += ["--drain-timeout-s", str(DRAIN_S), *tls_flags("--", "shard")]
    router_flags = ["--shard", f"127.0.0.1:{shard_port}", "--port", str(http_port), *tls_flags("--shard-", "router")]
    mounts = {"/etc/caravan/tls": certificates}
    variables = {"CARAVAN_HEALTH_ADDRESS": f"127.0.0.1:{health_port}"}
    with (
        container(SHARD, folder, shard_flags, {"/models/model.gguf": DEMO_MODEL, **mounts}, variables) as shard,
        container(ROUTER, folder, router_flags, mounts) as router,
    ):
        service = Service(router, shard, http_port)
        service.wait_until_healthy()
        yield service


def tls_flags(prefix: str, holder: str) -> list[str]:
    files = [f"/etc/caravan/tls/{holder}-{part}.pem" for part in ("chain", "key", "authorities")]
    names = ("certfile", "keyfile", "ca-certs")
    return [word for name, file in zip(names, files, strict=True) for word in (f"{prefix}{name}", file)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running(tmp_path_factory.mktemp("service")) as service:
        yield service


def test_a_request_is_streamed_through_router_and_shard(service: Service) -> None:
    events = list(service.stream(20))
    assert len(events) == 20
    assert "Paris" in str(events[-1]["generated_text"])


def test_programs_run_as_process_1_without_rights_on_a_read_only_root(service: Service) -> None:
    for program, name in ((service.router, b"caravan-router"), (service.shard, b"caravan-shard")):
        assert name in Path(f"/proc/{_pid(program)}/cmdline").read_bytes()
        status = program.run("cat", "/proc/1/status").stdout
        assert "Uid:\t10001\t10001\t10001\t10001" in status
        assert "CapBnd:\t0000000000000000" in status
        assert "NSpid:\t1\n" in status
        assert "Read-only file system" in program.run("touch", "/var/cache/caravan/file").stderr


def _pid(program: Container) -> int:
    state = subprocess.run(["runc", "state", program.name], capture_output=True, text=True, check=True)
    pid: int = json.loads(state.stdout)["pid"]
    return pid


def test_the_health_checks_of_the_images_pass(service: Service) -> None:
    for program, image in ((service.router, ROUTER), (service.shard, SHARD)):
        form, *command = image_config(image)["Healthcheck"]["Test"]
        assert form == "CMD"
        checked = program.run(*command)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_the_shard_computes_with_the_best_code_for_this_processor(service: Service) -> None:
    """llama.cpp has loaded one of its backends for x86-64 processors, not the slowest."""
    mapped = Path(f"/proc/{_pid(service.shard)}/maps").read_text()
    used = {line.rpartition("/")[2] for line in mapped.splitlines() if "/backends/libggml-cpu-" in line}
    assert len(used) == 1
    flags = Path("/proc/cpuinfo").read_text().split()
    if "avx2" in flags:
        assert "x64" not in used.pop()


@pytest.mark.parametrize("ended", ["router", "shard"])
def test_sigterm_lets_a_stream_end_and_then_ends_the_program(tmp_path: Path, ended: str) -> None:
    with running(tmp_path) as service:
        events = service.stream(LONG_OUTPUT)
        next(events)
        programs = [service.router, service.shard] if ended == "router" else [service.shard, service.router]
        asked = time.monotonic()
        programs[0].signal("TERM")
        assert len(list(events)) == LONG_OUTPUT - 1
        assert programs[0].wait(GRACE_S) == 0, programs[0].log.read_text()
        programs[1].signal("TERM")
        assert programs[1].wait(GRACE_S) == 0, programs[1].log.read_text()
        assert time.monotonic() - asked < GRACE_S


def test_sigterm_during_the_start_ends_the_program(tmp_path: Path) -> None:
    """The kernel drops signals to process 1 until it has handlers, so this sends SIGTERM until the program ends."""
    with container(ROUTER, tmp_path, ["--shard", "127.0.0.1:1", "--port", "0"]) as router:

        def signalled() -> bool:
            with contextlib.suppress(subprocess.CalledProcessError):
                router.signal("TERM")
            return router.process.poll() is not None

        wait_until(signalled, "the router ends")
        assert router.wait(0) == 128 + signal.SIGTERM
        assert "listening" not in router.log.read_text()


def test_the_router_has_no_llama_cpp_and_images_have_no_installer(tmp_path: Path) -> None:
    for image, has_llama in ((ROUTER, False), (SHARD, True)):
        working = buildah("from", "--pull-never", image).strip()
        try:
            root = Path(buildah("mount", working).strip())
            (packages,) = root.glob("opt/caravan/lib/python3*/site-packages")
            assert (packages / "llama_cpp").exists() == has_llama
            assert not (packages / "pip").exists()
            assert not list(root.glob("usr/bin/gcc*"))
        finally:
            buildah("rm", working)


def test_images_say_what_they_are() -> None:
    for image, title in ((ROUTER, "caravan-router"), (SHARD, "caravan-shard")):
        config = image_config(image)
        assert config["User"] == "10001:10001"
        assert config["Entrypoint"] == [title]
        labels = config["Labels"]
        assert labels["org.opencontainers.image.title"] == title
        assert labels["org.opencontainers.image.version"] == caravan_proto.__version__
        assert len(labels["org.opencontainers.image.revision"].removesuffix("-dirty")) == 40
