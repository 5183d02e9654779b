"""Where the addresses of shards come from, and when they count as new or gone."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from caravan_router.config import RouterConfig
from caravan_router.engine import discovery
from caravan_router.engine.discovery import Address, AddressFile, Discovery, DnsName, ShardSource, parse_source
from caravan_testing.waiting import eventually


class Names:
    """Stands in for DNS: the IP addresses of every name, or the error of looking it up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[str] | OSError = []
        # What is said of other names than those of the sources.
        self.whole: dict[str, list[str] | OSError] = {}
        self.lookups = 0
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", self._look_up)

    async def _look_up(self, host: str, port: int, **_options: object) -> list[Any]:
        self.lookups += host not in self.whole
        found = self.whole.get(host, self.found)
        if isinstance(found, OSError):
            raise found
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (ip, port, 0, 0))
            if ":" in ip
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))
            for ip in found
        ]

    async def looked_up(self, times: int = 2) -> None:
        """Wait until so many lookups have begun and ended since now."""
        target = self.lookups + times + 1
        await eventually(lambda: self.lookups >= target)


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    return Names(monkeypatch)


@contextlib.asynccontextmanager
async def watching(*sources: ShardSource) -> AsyncIterator[list[frozenset[str]]]:
    """Run a discovery and yield the list of the sets that it tells."""
    told: list[frozenset[str]] = []
    running = asyncio.create_task(Discovery(sources, 0.01, told.append).run())
    await eventually(lambda: bool(told))
    yield told
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("unix:/run/a.sock", Address("unix:/run/a.sock")),
        ("unix:a.sock", Address("unix:a.sock")),
        ("10.0.0.1:50051", Address("10.0.0.1:50051")),
        ("[::1]:50051", Address("[::1]:50051")),
        ("shard.example:1", Address("shard.example:1")),
        ("dns:shards.default.svc:50051", DnsName("shards.default.svc", 50051)),
        ("file:/etc/shards", AddressFile("/etc/shards")),
    ],
)
def test_a_source_is_read_from_a_flag(text: str, source: ShardSource) -> None:
    assert parse_source(text) == source
    assert RouterConfig(shard=(text,)).sources == (source,)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("", "unix:/path or host:port"),
        ("host", "unix:/path or host:port"),
        ("host:", "unix:/path or host:port"),
        ("host:port", "unix:/path or host:port"),
        ("two words:1", "unix:/path or host:port"),
        ("http://host:1", "unix:/path or host:port"),
        ("unix:", "unix:/path or host:port"),
        ("dns:name", "dns:name:port"),
        ("dns:name:", "dns:name:port"),
        ("file:", "file:path"),
    ],
)
def test_what_is_no_source_is_refused(text: str, form: str) -> None:
    with pytest.raises(ValueError, match=f"^--shard must be {form}. Given: '{text}'$"):
        RouterConfig(shard=(text,))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"shard_certfile": "c"}, "--shard-certfile and --shard-ca-certs need each other"),
        ({"shard_ca_certs": "a"}, "--shard-certfile and --shard-ca-certs need each other"),
        ({"shard_hostname": "n"}, "need --shard-certfile and --shard-ca-certs"),
        ({"shard_keyfile": "k"}, "need --shard-certfile and --shard-ca-certs"),
    ],
)
def test_flags_of_tls_to_shards_that_lack_others_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RouterConfig(**fields)


async def test_fixed_addresses_are_known_at_once() -> None:
    async with watching(Address("a:1"), Address("unix:/b"), Address("a:1")) as told:
        assert told == [{"a:1", "unix:/b"}]


async def test_a_name_has_a_shard_at_each_of_its_ip_addresses(names: Names) -> None:
    names.found = ["10.0.0.1", "10.0.0.2", "fd00::1"]
    async with watching(DnsName("shards", 50051), Address("a:1")) as told:
        await names.looked_up()
        assert told == [{"a:1"}, {"a:1", "10.0.0.1:50051", "10.0.0.2:50051", "[fd00::1]:50051"}]


async def test_an_address_is_gone_when_two_lookups_in_a_row_lack_it(names: Names) -> None:
    names.found = ["10.0.0.1", "10.0.0.2"]
    async with watching(DnsName("shards", 1)) as told:
        await names.looked_up()
        names.found = ["10.0.0.2", "10.0.0.3"]
        await names.looked_up()
        both = {"10.0.0.1:1", "10.0.0.2:1"}
        assert told[1:] == [both, both | {"10.0.0.3:1"}, {"10.0.0.2:1", "10.0.0.3:1"}]


NO_NAME = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
NO_DATA = socket.gaierror(socket.EAI_NODATA, "No address associated with hostname")
AGAIN = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


@pytest.mark.parametrize(
    ("first", "last", "left"),
    [
        (NO_NAME, NO_NAME, set()),
        (NO_NAME, NO_DATA, set()),
        # The cluster's own servers fail.
        (AGAIN, AGAIN, {"10.0.0.1:1"}),
        (NO_NAME, AGAIN, {"10.0.0.1:1"}),
        (NO_NAME, ["10.0.0.2"], {"10.0.0.2:1"}),
    ],
)
async def test_a_name_without_an_address_is_known_where_no_other_names_can_be_looked_up(
    names: Names, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: Any, last: Any, left: set[str]
) -> None:
    """As in a cluster without a way out: the last name that is tried, which has no domain, fails for another reason."""
    monkeypatch.setattr(discovery, "RESOLVER_FILE", tmp_path / "resolv.conf")
    await asyncio.to_thread(
        (tmp_path / "resolv.conf").write_text, "search old\n# x\nsearch one.svc.cluster.local cluster.local.\n"
    )
    names.found = ["10.0.0.1"]
    async with watching(DnsName("shards.one.svc", 1)) as told:
        await names.looked_up()
        assert told[-1] == {"10.0.0.1:1"}
        names.whole = {
            "shards.one.svc.one.svc.cluster.local.": first,
            "shards.one.svc.cluster.local.": last,
        }
        names.found = AGAIN
        await names.looked_up(7)
        assert told[-1] == left


async def test_a_name_that_cannot_be_resolved_keeps_its_addresses(
    names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    names.found = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    async with watching(DnsName("shards", 1)) as told:
        await names.looked_up()
        assert told == [frozenset()]
        names.found = ["10.0.0.1"]
        await names.looked_up()
        names.found = socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        await names.looked_up(5)
        assert told == [frozenset(), {"10.0.0.1:1"}]
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [(record.__dict__["source"], record.__dict__["shards"]) for record in warnings] == [
        ("dns:shards:1", 0),
        ("dns:shards:1", 1),
    ]


async def test_a_name_that_has_no_address_for_long_loses_those_that_it_had(names: Names) -> None:
    async with watching(DnsName("shards", 1)) as told:
        names.found = ["10.0.0.1"]
        await names.looked_up()
        names.found = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        before = names.lookups
        await eventually(lambda: told[-1] == frozenset())
        assert names.lookups - before >= 5
        names.found = ["10.0.0.2"]
        await names.looked_up()
        assert told == [frozenset(), {"10.0.0.1:1"}, frozenset(), {"10.0.0.2:1"}]


def replace_file(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


async def test_a_file_is_read_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "shards"
    await asyncio.to_thread(replace_file, path, "# two\n10.0.0.1:1  # the first\n\n unix:/b \n")
    async with watching(AddressFile(str(path))) as told:
        await eventually(lambda: told[-1] == {"10.0.0.1:1", "unix:/b"})
        await asyncio.to_thread(replace_file, path, "unix:/b\nunix:/c\n")
        await eventually(lambda: told[-1] == {"unix:/b", "unix:/c"})
        await asyncio.to_thread(replace_file, path, "# none\n")
        await eventually(lambda: told[-1] == frozenset())


@pytest.mark.parametrize("damage", ["missing", "no address", "not UTF-8"])
async def test_a_file_that_cannot_be_read_keeps_its_addresses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    path = tmp_path / "shards"

    def spoil() -> None:
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(b"unix:/c\nno address\n" if damage == "no address" else b"\xff:1\n")

    await asyncio.to_thread(path.write_text, "unix:/a\n")
    async with watching(AddressFile(str(path))) as told:
        await eventually(lambda: told[-1] == {"unix:/a"})
        await asyncio.to_thread(spoil)
        await eventually(lambda: "looked up" in caplog.text)
        await asyncio.sleep(0.1)
        assert told[-1] == {"unix:/a"}
        await asyncio.to_thread(replace_file, path, "unix:/b\n")
        await eventually(lambda: told[-1] == {"unix:/b"})
    assert caplog.text.count("looked up") == 1
