"""A recording is played in virtual time, as it was and otherwise."""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from bench.simulate.simulation import ShardKind

from caravan_router.config import RouterConfig
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import Cancelled, Submitted
from caravan_scheduler.scheduler import Scheduler
from caravan_studio.recording.recorder import Recorder
from caravan_studio.replay.cli import main
from caravan_studio.replay.played_shard import PlayedShard
from caravan_studio.replay.virtual_fleet import Fleet, Member
from caravan_testing.model_media import ENCODER, with_pictures
from caravan_testing.recorded import recorded
from caravan_testing.requests import request

REQUESTS = 60


def record_load(path: Path) -> None:
    """Record a fleet of one shard that gets more than it can compute at once."""
    recorder = Recorder(path)
    config = SchedulerConfig()
    scheduler = recorded(Scheduler(config), config, recorder)
    kind = ShardKind(sequences=4, cells=8000, host_cells=1000)
    fleet = Fleet([scheduler], [Member(PlayedShard("a", kind.times), kind.limits, 0)], lambda *_: None)
    fleet.begin()
    chance = random.Random(7)
    for number in range(1, REQUESTS + 1):
        at_s = number * 0.15
        fleet.run_until(at_s)
        prompt = tuple(chance.randrange(500) for _ in range(chance.randrange(50, 400)))
        asked = request(number, prompt, chance.randrange(10, 60), arrived_s=at_s, ignore_eos=True)
        fleet.handle([Submitted(asked)])
        if number == 20:
            fleet.handle([Cancelled(19)])
    fleet.run_until(200.0)
    recorder.close()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "recording"
    record_load(path)
    return path


def rows(text: str) -> dict[str, list[float]]:
    """Return the numbers of a printed table by the names of its rows."""
    found: dict[str, list[float]] = {}
    for line in text.splitlines()[1:]:
        name, *numbers = [cell.strip() for cell in line.replace(" ms", "").split("  ") if cell]
        found[name] = [math.nan if number == "-" else float(number) for number in numbers]
    return found


def test_one_more_shard_answers_sooner_and_the_same_again_answers_as_before(
    recording: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(RouterConfig, [str(recording), "--shards", "+1"]) == 0
    found = rows(capsys.readouterr().out)
    recorded, again, more = found["recorded"], found["played again"], found["--shards +1"]
    requests, answered, failed, tokens, tokens_s, ttft_p50, ttft_p99, *_ = recorded
    assert (requests, failed) == (REQUESTS, 0)
    assert answered >= REQUESTS - 1
    assert again[:4] == recorded[:4]
    assert again[4:6] == pytest.approx([tokens_s, ttft_p50], rel=0.1)
    assert more[3] == pytest.approx(tokens, abs=60), "one was cancelled"
    assert more[4] > 1.2 * tokens_s
    assert more[5] < 0.5 * ttft_p50
    assert more[6] < ttft_p99


def test_another_flag_is_applied(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RouterConfig, [str(recording), "--with", "max-batch-size=1"]) == 0
    found = rows(capsys.readouterr().out)
    assert found["--with max-batch-size=1"][4] < 0.7 * found["recorded"][4]


@pytest.mark.parametrize(
    ("change", "told"),
    [("hello=1", "knows the flags of the scheduler"), ("target-itl-ms", "FLAG=VALUE"), ("max-batch-size=x", "whole")],
)
def test_a_change_that_cannot_be_made_is_refused_by_name(
    recording: Path, capsys: pytest.CaptureFixture[str], change: str, told: str
) -> None:
    assert main(RouterConfig, [str(recording), "--with", change]) == 2
    assert told in capsys.readouterr().err


def test_without_its_only_shard_nothing_is_answered(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RouterConfig, [str(recording), "--shards", "-1"]) == 0
    requests, answered, failed, *_ = rows(capsys.readouterr().out)["--shards -1"][:4]
    assert (answered, failed) == (0, requests - 1), "one was cancelled"


class SeeingShard(PlayedShard):
    """Encodes a medium in a quarter of a second."""

    def encode_s(self, media_id: bytes) -> float:
        assert media_id
        return 0.25


def test_media_take_as_long_to_encode_as_they_took(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recording"
    recorder = Recorder(path)
    config = SchedulerConfig()
    scheduler = recorded(Scheduler(config), config, recorder)
    kind = ShardKind(sequences=4, cells=8000, host_cells=1000)
    shard = SeeingShard("a", kind.times)
    fleet = Fleet([scheduler], [Member(shard, replace(kind.limits, encoder=ENCODER), 0)], lambda *_: None)
    fleet.begin()
    for number in range(1, 11):
        fleet.run_until(number * 1.0)
        prompt, media = with_pictures([number] * 60, [(10, 20, 2 * number), (35, 20, 2 * number + 1)])
        fleet.handle([Submitted(request(number, prompt, 5, arrived_s=number * 1.0, media=media))])
    fleet.run_until(100.0)
    recorder.close()
    assert main(RouterConfig, [str(path), "--with", "max-batch-size=4"]) == 0
    for row in rows(capsys.readouterr().out).values():
        requests, answered, _, _, _, ttft_p50, *_ = row
        assert requests == answered == 10
        assert 500 < ttft_p50 < 700, "two pictures, one after another"
