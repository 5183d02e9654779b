"""A network namespace with a link to this one, as if a shard ran on another host. Not every user may make one."""

import asyncio
import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Namespace:
    """The namespace ``name``. Programs in it have the address ``host``, and reach this side through ``link``."""

    name: str
    link: str
    host: str

    @property
    def command(self) -> tuple[str, ...]:
        """Return what to put before a command that is to run there. The process keeps its id."""
        return ("ip", "netns", "exec", self.name)

    async def set_link(self, state: str) -> None:
        """Take the link ``down`` or ``up``. While it is down, packets vanish."""
        await asyncio.to_thread(_ip, "-n", self.name, "link", "set", self.link, state)


@contextlib.asynccontextmanager
async def namespace() -> AsyncIterator[Namespace | str]:
    """Make a namespace and remove it at the end; yield why not where this process cannot."""
    # RFC 2544 sets these addresses apart for tests.
    number = os.getpid()
    made = Namespace(f"chaos-{number}", f"cb{number}", f"198.18.{number % 256}.2")
    near_end, near = f"ca{number}", f"198.18.{number % 256}.1"
    if shutil.which("ip") is None:
        yield "there is no program `ip` here"
        return
    try:
        await asyncio.to_thread(_ip, "netns", "add", made.name)
    except subprocess.CalledProcessError as error:
        yield f"no network namespace can be made here: {error.stderr.strip()}"
        return
    try:
        for command in (
            ("link", "add", near_end, "type", "veth", "peer", "name", made.link, "netns", made.name),
            ("addr", "add", f"{near}/30", "dev", near_end),
            ("link", "set", near_end, "up"),
            ("-n", made.name, "addr", "add", f"{made.host}/30", "dev", made.link),
            ("-n", made.name, "link", "set", made.link, "up"),
            ("-n", made.name, "link", "set", "lo", "up"),
        ):
            try:
                await asyncio.to_thread(_ip, *command)
            except subprocess.CalledProcessError as error:
                yield f"no link to a network namespace can be made here: {error.stderr.strip()}"
                return
        yield made
    finally:
        # The link goes with it.
        await asyncio.to_thread(_ip, "netns", "del", made.name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
