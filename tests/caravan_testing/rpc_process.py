"""llama.cpp's rpc-server as a process: a device that needs no GPU."""

import contextlib
import os
import socket
import subprocess
import sys
import time


class RpcServer:
    """A process on a port of its own, which it keeps when it is started again."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "caravan_testing.rpc_server", str(self.port)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
                return
            assert self.process.poll() is None, "the rpc-server has ended; its message is above"
            assert time.monotonic() < deadline, f"{command} does not listen"
            time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
