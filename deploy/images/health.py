"""Ends with 0 if the router, the shard or both of this container are healthy, else with 1 and a reason.

Process 1 is the program, or an init that runs it. Its flags and variables say where it answers.
"""

import http.client
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from caravan_proto.environment import prepare_grpc
from caravan_proto.flags import load

if TYPE_CHECKING:
    from caravan_router.config import RouterConfig

_TIMEOUT_S = 5.0


def main() -> None:
    """Ask the program of this container."""
    words = Path("/proc/1/cmdline").read_bytes().decode().rstrip("\0").split("\0")
    for position, word in enumerate(words):
        match Path(word).name:
            case "caravan-router":
                return _check_router(words[position + 1 :])
            case "caravan-shard":
                return _check_shard(words[position + 1 :])
            case "caravan" if words[position + 1 : position + 2] == ["serve"]:
                return _check_serve(words[position + 2 :])
    sys.exit(f"process 1 is neither a router nor a shard: {' '.join(words)}")


def _check_serve(flags: list[str]) -> None:
    from caravan_serve.cli import read_flags

    _check_address(read_flags(flags)[1])


def _check_router(flags: list[str]) -> None:
    from caravan_router.config import RouterConfig

    _check_address(load(RouterConfig, prog="caravan-router", description="", argv=flags))


def _check_address(config: "RouterConfig") -> None:
    host = _reachable(config.hostname)
    if config.ssl_ca_certs is not None:
        # The router answers no client without a certificate.
        socket.create_connection((host, config.port), _TIMEOUT_S).close()
        return
    if config.ssl_certfile is None:
        connection = http.client.HTTPConnection(host, config.port, timeout=_TIMEOUT_S)
    else:
        # The certificate has the router's public name.
        context = ssl._create_unverified_context()  # noqa: S323
        connection = http.client.HTTPSConnection(host, config.port, timeout=_TIMEOUT_S, context=context)
    connection.request("GET", "/health")
    if (status := connection.getresponse().status) != http.client.OK:
        sys.exit(f"/health answers {status}")


def _check_shard(flags: list[str]) -> None:
    prepare_grpc()
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from caravan_shard.config import ShardConfig

    config = load(ShardConfig, prog="caravan-shard", description="", argv=flags)
    host, _, port = (config.health_address or config.address).rpartition(":")
    address = f"{_reachable(host)}:{port}"
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest()
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S).status
        except grpc.RpcError as error:
            sys.exit(f"{address}: {error.code().name}: {error.details()}")
    if status != health_pb2.HealthCheckResponse.SERVING:
        sys.exit(f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}")


def _reachable(host: str) -> str:
    """Return the address at which this host reaches a program that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "[::1]"}.get(host, host)  # noqa: S104 - listens nowhere


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        sys.exit(str(error))
