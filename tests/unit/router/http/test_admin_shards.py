"""Routes for operators that list and drain shards."""

import time

import pytest

from caravan_dialects.api.admin.descriptions import shard_of
from caravan_dialects.api.limits import Limits
from caravan_proto.messages.model import Numerics
from caravan_scheduler.core.shards import ShardReport, ShardRoom, ShardStanding, ShardState
from caravan_testing.http_server import Service, serving
from caravan_testing.scripted_engine import ScriptedEngine


async def test_shards_are_listed(service: Service) -> None:
    now = time.monotonic()
    room = ShardRoom(max_sequences=8, max_batch_tokens=512, cells=4096, cells_per_sequence=512, unified=False)
    new, lost = (
        ShardStanding(state=ShardState.JOINING, since_s=now - 5.0),
        ShardStanding(state=ShardState.LOST, since_s=now - 60.0, reason="UNAVAILABLE: gone", next_try_s=now + 3.0),
    )
    service.engine.reports = [
        ShardReport(address="10.0.0.1:1", standing=new, epoch=0),
        ShardReport(
            address="unix:/b",
            standing=lost,
            epoch=7,
            shard_id="b",
            version="1.2",
            model="toy",
            model_fingerprint="toy-1",
            room=room,
            numerics=Numerics(
                fingerprint="ab12",
                exact=False,
                flash_attention={"split": False},
                same_in_company=True,
                same_in_chunks=None,
            ),
            sequences=2,
            used_cells=99,
        ),
    ]
    response = await service.client.get("/admin/shards")
    first, second = (await response.json())["shards"]
    assert 5.0 <= first.pop("state_s") < 60.0 <= second.pop("state_s")
    assert 0.0 <= second.pop("next_try_s") <= 3.0
    unknown = ["reason", "next_try_s", "shard_id", "version", "model", "model_fingerprint"]
    nothing = dict.fromkeys([*unknown, "limits", "layout", "speculation", "numerics"])
    assert first == {"address": "10.0.0.1:1", "state": "joining", "epoch": 0, "sequences": 0, "used_cells": 0} | nothing
    assert second == {
        "address": "unix:/b",
        "state": "lost",
        "reason": "UNAVAILABLE: gone",
        "epoch": 7,
        "shard_id": "b",
        "version": "1.2",
        "model": "toy",
        "model_fingerprint": "toy-1",
        "limits": {"max_sequences": 8, "max_batch_tokens": 512, "cells": 4096, "cells_per_sequence": 512},
        "layout": "split",
        "speculation": {
            "max_draft_tokens": 0,
            "off_because": "the router has --speculate 0",
            "equal_lengths": True,
        },
        "numerics": {
            "fingerprint": "ab12",
            "exact": False,
            "flash_attention": {"split": False},
            "same_in_company": True,
            "same_in_chunks": None,
        },
        "sequences": 2,
        "used_cells": 99,
    }


CANNOT_CUT_BACK = "the memory of its sequences cannot be cut back (see the shard's --rollback-tokens)"


@pytest.mark.parametrize(("draft_tokens", "most", "reason"), [(64, 64, None), (0, 0, CANNOT_CUT_BACK)])
async def test_operators_see_whether_drafts_are_possible(draft_tokens: int, most: int, reason: str | None) -> None:
    room = ShardRoom(
        max_sequences=8,
        max_batch_tokens=512,
        cells=4096,
        cells_per_sequence=512,
        unified=True,
        draft_tokens=draft_tokens,
    )
    engine = ScriptedEngine()
    engine.reports = [ShardReport(address="1", standing=standing(ShardState.SERVING), epoch=1, room=room)]
    async with serving(engine, Limits(max_draft_tokens=8)) as service:
        response = await service.client.get("/admin/shards")
        (shard,) = (await response.json())["shards"]
    expected = {"max_draft_tokens": most, "off_because": reason, "equal_lengths": False}
    assert shard["speculation"] == expected


def standing(state: ShardState) -> ShardStanding:
    return ShardStanding(state=state, since_s=time.monotonic())


@pytest.mark.parametrize("name", ["unix:%2Fb", "b"])
async def test_a_shard_is_drained_by_its_address_or_its_id(service: Service, name: str) -> None:
    service.engine.reports = [
        ShardReport(address="unix:/a", standing=standing(ShardState.SERVING), epoch=1, shard_id="a"),
        ShardReport(address="unix:/b", standing=standing(ShardState.SERVING), epoch=1, shard_id="b"),
    ]
    response = await service.client.post(f"/admin/shards/{name}/drain")
    states = [shard["state"] for shard in (await response.json())["shards"]]
    assert (response.status, states) == (200, ["serving", "draining"])


@pytest.mark.parametrize("name", ["c", "same", "down"])
async def test_only_one_shard_that_is_up_is_drained(service: Service, name: str) -> None:
    service.engine.reports = [
        ShardReport(address="1", standing=standing(ShardState.SERVING), epoch=1, shard_id="same"),
        ShardReport(address="2", standing=standing(ShardState.SERVING), epoch=1, shard_id="same"),
        ShardReport(address="3", standing=standing(ShardState.LOST), epoch=1, shard_id="down"),
    ]
    response = await service.client.post(f"/admin/shards/{name}/drain")
    message = f"No shard with this name is up. Given: {name}"
    assert (response.status, await response.json()) == (404, {"error": message, "error_type": "not_found"})
    assert not any(report.standing.state is ShardState.DRAINING for report in service.engine.reports)


@pytest.mark.parametrize(
    ("unified", "exact", "compared", "shown"),
    [
        (False, False, True, True),
        # It was compared in the split layout, which the shard has left.
        (True, False, True, False),
        (True, False, None, None),
        (True, True, True, True),
    ],
)
def test_a_text_may_depend_on_its_company_in_the_unified_layout(
    unified: bool, exact: bool, compared: bool | None, shown: bool | None
) -> None:
    report = ShardReport(
        address="a",
        epoch=1,
        standing=ShardStanding(state=ShardState.SERVING, since_s=0.0),
        room=ShardRoom(
            max_sequences=8, max_batch_tokens=512, cells=64, cells_per_sequence=8, unified=unified, draft_tokens=0
        ),
        numerics=Numerics(fingerprint="f", exact=exact, same_in_company=compared),
    )
    numerics = shard_of(report, 1.0, 0).numerics
    assert numerics is not None
    assert numerics.same_in_company is shown
