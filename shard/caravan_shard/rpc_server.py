"""The command `caravan rpc-server`: lends this host's devices to a shard on another host.

It is llama.cpp's rpc-server: it has no authentication and no encryption, and serves one shard at a time. The shard has
`--rpc` with its address, and needs the same version of Caravan.
"""

import os
import signal
import sys
import threading
from collections.abc import Sequence

from caravan_proto.command_line import Parser
from caravan_shard.placement_flags import parse_rpc_servers
from caravan_shard.startup_error import StartupError

_ENDINGS = (signal.SIGINT, signal.SIGTERM)


def rpc_server_parser() -> Parser:
    """Return the parser of `caravan rpc-server`."""
    parser = Parser(prog="caravan rpc-server", description=__doc__)
    parser.add_argument(
        "--address", default="127.0.0.1:50053", help="IPv4 address and port to listen on [127.0.0.1:50053]"
    )
    parser.add_argument(
        "--device", default="", help="GPUs to lend, by name, separated by commas; none = CPU [all GPUs]"
    )
    parser.add_argument("--threads", type=int, default=0, help="threads of a CPU that is lent [one for each CPU]")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal, and return 0; 2 if the server cannot start."""
    parser = rpc_server_parser()
    arguments = parser.parse_args(argv)
    try:
        parse_rpc_servers(arguments.address)
    except ValueError:
        parser.error(f"--address must be IPV4:PORT. Given: {arguments.address!r}")
    if arguments.threads < 0:
        parser.error(f"--threads must be at least 1, or 0 for all CPUs. Given: {arguments.threads}")
    # Before there are other threads, which inherit it: llama.cpp does not return, and a container's first process
    # ignores signals that it does not wait for.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDINGS)
    try:
        handles = _handles(arguments.device)
    except StartupError as error:
        sys.stderr.write(f"{parser.prog}: error: {error}\n")
        return 2
    threads = arguments.threads or len(os.sched_getaffinity(0))
    threading.Thread(target=_serve, args=(parser.prog, arguments.address, threads, handles), daemon=True).start()
    signal.sigwait(_ENDINGS)
    sys.stdout.flush()
    # Without freeing devices that a step may still use.
    os._exit(0)


def _serve(prog: str, address: str, threads: int, handles: Sequence[int]) -> None:
    """Serve, or end the process with status 2."""
    from caravan_shard.backends.llama.devices.rpc import serve_devices

    try:
        serve_devices(address, threads, handles)
        problem = f"cannot serve on {address}; llama.cpp's message is above"
    except StartupError as error:
        problem = str(error)
    sys.stderr.write(f"{prog}: error: {problem}\n")
    sys.stderr.flush()
    os._exit(2)


def _handles(wanted: str) -> list[int]:
    """Return llama.cpp's devices of these names; without names all GPUs, or else the CPU. Raises StartupError."""
    from caravan_shard.backends.llama.devices.devices import first_devices
    from caravan_shard.backends.llama.devices.rpc import cpu_handle

    devices = {device.name: device.handle for device in first_devices()}
    names = [] if wanted == "none" else [name.strip() for name in wanted.split(",")] if wanted else list(devices)
    if unknown := [name for name in names if name not in devices]:
        raise StartupError(f"there is no device {unknown[0]}. There are: {', '.join(devices) or 'none'}")
    return [devices[name] for name in names] or [cpu_handle()]
