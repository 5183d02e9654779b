"""Two routers behind nginx with the hash that the chart asks of ingress-nginx: clients find what they have stored."""

import contextlib
import http.client
import json
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from deploy.chart import rendered
from deploy.rollout.cluster import Size, cluster, until_ready
from deploy.tools import tool_path

from caravan_testing.programs import configuration, kept_ports
from caravan_testing.waiting import DEADLINE_S, wait_until

KEYS = 20
FOLLOW_UPS = 5
# ingress-nginx makes this line of the annotation `upstream-hash-by`.
HTTP = """
upstream routers {{ hash {key} consistent; {servers} }}
server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://routers; add_header X-Router $upstream_addr; }}
}}
"""


def hash_key() -> str:
    """Return what the chart's Ingress hashes requests by."""
    (ingress,) = (document for document in rendered("zones") if document["kind"] == "Ingress")
    return str(ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/upstream-hash-by"])


@contextlib.contextmanager
def nginx(folder: Path, routers: list[str]) -> Iterator[int]:
    """Run nginx in front of routers until the block ends, and yield its port."""
    with kept_ports(1) as (port,), _nginx_on(port, folder, routers):
        yield port


@contextlib.contextmanager
def _nginx_on(port: int, folder: Path, routers: list[str]) -> Iterator[None]:
    servers = " ".join(f"server {router}:3000;" for router in routers)
    path = folder / "nginx.conf"
    path.write_text(configuration(folder, HTTP.format(key=hash_key(), servers=servers, port=port)))
    process = subprocess.Popen([tool_path("nginx"), "-p", folder, "-e", folder / "error.log", "-c", path])
    try:
        wait_until(
            lambda: socket.create_connection(("127.0.0.1", port)),
            "nginx listens",
            ignoring=(ConnectionRefusedError,),
            unless=lambda: process.poll() is not None and (folder / "error.log").read_text(),
        ).close()
        yield
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def respond(port: int, key: str, previous: str | None) -> tuple[int, str, str | None]:
    """Return the status of a response, its id, and the router that gave it."""
    body = {"input": "a", "max_output_tokens": 2, "previous_response_id": previous}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)) as connection:
        connection.request("POST", "/v1/responses", json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read()).get("id", ""), reply.headers["X-Router"]


def test_every_follow_up_finds_the_router_that_has_stored_the_response(tmp_path: Path) -> None:
    with cluster(tmp_path, Size(2)) as running:
        pods = [running.start_pod("shard", f"caravan-demo-cpu-{number}") for number in range(2)]
        routers = [running.start_pod("router", f"caravan-router-{number}") for number in range(2)]
        for pod in (*pods, *routers):
            until_ready(pod)
        with nginx(tmp_path, [router.place.address for router in routers]) as port:

            def converse(number: int) -> list[tuple[int, str | None]]:
                seen = []
                previous = None
                for _ in range(1 + FOLLOW_UPS):
                    status, previous, router = respond(port, f"key-{number}", previous)
                    seen.append((status, router))
                return seen

            with ThreadPoolExecutor(4) as clients:
                conversations = list(clients.map(converse, range(KEYS)))
    assert [status for seen in conversations for status, _ in seen] == [200] * KEYS * (1 + FOLLOW_UPS)
    assert all(len({router for _, router in seen}) == 1 for seen in conversations)
    assert {router for seen in conversations for _, router in seen} == {
        f"{router.place.address}:3000" for router in routers
    }
