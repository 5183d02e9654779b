"""`caravan rpc-server` as a process: a device that needs no GPU."""

import contextlib
import os
import socket
import subprocess
import sys

from caravan_testing.programs import kept_ports
from caravan_testing.waiting import wait_until


class RpcServer:
    """A process on a port of its own, which it keeps when it is started again."""

    def __init__(self) -> None:
        self._kept = contextlib.ExitStack()
        (self.port,) = self._kept.enter_context(kept_ports(1))
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        words = ("rpc-server", "--address", self.address, "--device", "none", "--threads", "1")
        command = [sys.executable, "-c", "from caravan_serve.commands import main; main()", *words]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)

        def connect() -> bool:
            with socket.create_connection(("127.0.0.1", self.port)):
                return True

        wait_until(
            connect,
            f"{command} listens",
            ignoring=(ConnectionRefusedError,),
            unless=lambda: self.process.poll() is not None and "the rpc-server has ended; its message is above",
        )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
