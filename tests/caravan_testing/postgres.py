"""A PostgreSQL server of the test process, at a socket in a temporary folder, with a new database for each caller."""

import atexit
import os
import shutil
import subprocess
import tempfile
from functools import cache
from itertools import count
from pathlib import Path

import psycopg

_NUMBERS = count()
# A lost power cannot be tested, and waiting for the disk takes time.
_SETTINGS = ("fsync=off", "full_page_writes=off", "listen_addresses=", "max_connections=200")


class Cluster:
    """A running server. ``folder``: of its socket and its data."""

    def __init__(self) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
        assert found, "no PostgreSQL server: apt-get install postgresql"
        self._programs = found[-1]
        self.folder = Path(tempfile.mkdtemp(prefix="caravan-pg-"))
        # The server refuses to run as root.
        self._user = "postgres" if os.getuid() == 0 else None
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self.folder.chmod(0o755)
        self._run("initdb", "--no-sync", "--auth=trust", "--encoding=UTF8", "--no-locale", "--username=caravan")
        self.start()
        atexit.register(self._remove)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._programs / program), f"--pgdata={self.folder}/data", *arguments]
        with (self.folder / "commands").open("a+b") as output:  # Not a pipe, which the server would keep open.
            done = subprocess.run(
                command, user=self._user, cwd="/", stdin=subprocess.DEVNULL, stdout=output, stderr=output, check=False
            )
        assert done.returncode == 0, f"{command}: {(self.folder / 'commands').read_text()}"

    def start(self) -> None:
        """Start the server and wait until it accepts connections."""
        options = " ".join(f"-c {setting}" for setting in (*_SETTINGS, f"unix_socket_directories={self.folder}"))
        self._run("pg_ctl", "start", "--wait", f"--log={self.folder}/log", f"--options={options}")

    def stop(self) -> None:
        """Stop the server at once, as a crash does."""
        self._run("pg_ctl", "stop", "--mode=immediate", "--wait")

    def new_database(self) -> str:
        """Return the URL of a new database."""
        name = f"d{next(_NUMBERS)}"
        with psycopg.connect(self._url("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self._url(name)

    def _url(self, database: str) -> str:
        return f"postgresql:///{database}?host={self.folder}&user=caravan"

    def _remove(self) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


@cache
def cluster() -> Cluster:
    """Return the server that the tests of this process share."""
    return Cluster()
