"""What the log says of a shard that does not answer."""

import asyncio
import logging
from collections.abc import Iterator

import pytest

from caravan_router.engine import link as links
from caravan_router.engine.link import LinkOwner, ShardLink
from caravan_router.engine.link_config import LinkConfig
from caravan_router.engine.shard_calls import ShardCalls, ShardRpcError
from caravan_testing.waiting import eventually

_REFUSED, _NO_ROUTE = "connection refused", "no route to host"


def _link(reasons: Iterator[str]) -> ShardLink:
    """Return a link to a shard that cannot be reached for these reasons, the last of which stays."""
    last = ""

    def connect(_address: str) -> ShardCalls:
        nonlocal last
        last = next(reasons, last)
        raise ShardRpcError(None, last)

    owner = LinkOwner(accept=lambda _link, _info: "it never joins")
    return ShardLink("host:1", LinkConfig(router_id="test", connect=connect), owner)


async def _warned(link: ShardLink, caplog: pytest.LogCaptureFixture, until: str) -> list[str]:
    """Let ``link`` try again until it fails for the reason ``until``; return the reasons of which the log warns."""
    with caplog.at_level(logging.INFO, links.__name__):
        running = asyncio.create_task(link.run())
        await eventually(lambda: link.standing.reason == until, "it has tried so often")
        running.cancel()
        await asyncio.wait({running})
    return [vars(record)["reason"] for record in caplog.records if record.message == "shard cannot be reached"]


async def test_each_reason_is_told_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(links, "_UNREACHED_S", 0.0)
    monkeypatch.setattr(links, "_MAX_BACKOFF_S", 0.001)
    monkeypatch.setattr(links, "_FIRST_BACKOFF_S", 0.001)
    reasons = iter((_REFUSED, _REFUSED, _NO_ROUTE, _REFUSED, _NO_ROUTE, "the end"))
    assert await _warned(_link(reasons), caplog, "the end") == [_REFUSED, _NO_ROUTE, "the end"]


async def test_a_shard_that_is_about_to_start_is_not_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(links, "_FIRST_BACKOFF_S", 0.001)
    assert await _warned(_link(iter((_REFUSED, _NO_ROUTE, "the end"))), caplog, "the end") == []
