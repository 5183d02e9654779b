"""The command `caravan replay`: what it is asked, and what it prints."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from caravan_proto.command_line import Parser
from caravan_scheduler.config import SchedulerConfig
from caravan_studio.recording.lines import RecordingError, RecordingFile
from caravan_studio.replay.changes import ChangeError, SchedulerFlags, changed
from caravan_studio.replay.demand import Demand
from caravan_studio.replay.outcome import table
from caravan_studio.replay.player import Played, Player, play
from caravan_studio.replay.what_if import Change, WhatIf

# So many differences of a call are shown, and so many characters of each.
_MOST_SHOWN = 10
_MOST_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class _Question:
    """What is asked of a recording: other values of flags of the router, and so many shards more."""

    router: type[SchedulerFlags]
    changes: Sequence[str]
    shards: int

    @property
    def name(self) -> str:
        shards = [f"--shards {self.shards:+}"] if self.shards else []
        return " ".join([*(f"--with {change}" for change in self.changes), *shards])

    def of(self, config: SchedulerConfig) -> SchedulerConfig:
        """Return ``config`` with the changes. Raises ChangeError."""
        return changed(config, self.changes, self.router)


def replay_parser() -> Parser:
    """Return the parser of `caravan replay`."""
    parser = Parser(
        prog="caravan replay", description="Replay what a router recorded with --record, and compare every decision."
    )
    parser.add_argument("file", type=Path, help="the recording")
    parser.add_argument(
        "--with",
        dest="changes",
        action="append",
        default=[],
        metavar="FLAG=VALUE",
        help="simulate the same requests in virtual time with another value of a scheduler flag; repeatable",
    )
    parser.add_argument(
        "--shards", type=int, default=0, metavar="+N", help="simulate them with N more shards, like the first, or fewer"
    )
    return parser


def main(router: type[SchedulerFlags], argv: Sequence[str] | None = None) -> int:
    """Play a recording. Return 0 if all decisions are the same, 1 if one is not, 2 if it cannot be played.

    ``router``: the flags of the program that recorded it, of which ``--with`` changes some.
    """
    arguments = replay_parser().parse_args(argv)
    try:
        recording = RecordingFile(arguments.file)
        if arguments.changes or arguments.shards:
            return _ask_what_if(recording, _Question(router, arguments.changes, arguments.shards))
        return _compare(recording)
    except (RecordingError, ChangeError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        sys.stderr.write(f"caravan replay: error: {arguments.file}: {reason}\n")
        return 2


def _ask_what_if(recording: RecordingFile, question: _Question) -> int:
    """Print what clients saw and would have seen. Return 1 if this scheduler does not decide what was recorded."""
    question.of(SchedulerConfig())  # so that a mistake is told before all is played
    player, demands = Player(), dict[int, Demand]()
    for played in play(recording, player):
        if played.differences:
            _print_differences(played, recording.header.at)
            return 1
        number = played.call.scheduler
        if number not in demands:
            demands[number] = Demand(player.configs[number])
        demands[number].note(played, player)
    for number, demand in demands.items():
        if not demand.asked:
            continue
        rows = {
            "recorded": demand.seen.figures(),
            "played again": WhatIf(demand, Change(demand.config)).run(),
            question.name: WhatIf(demand, Change(question.of(demand.config), question.shards)).run(),
        }
        sys.stdout.write(table(player.models[number], rows))
        if demand.left_out:
            sys.stdout.write(f"{demand.left_out} requests are left out: beam searches and those of replaced weights\n")
    return 0


def _compare(recording: RecordingFile) -> int:
    """Print whether every decision is the same. Return 1 if one is not."""
    player, calls, decisions = Player(), 0, 0
    first_s = last_s = recording.header.at
    for played in play(recording, player):
        if played.differences:
            _print_differences(played, recording.header.at)
            return 1
        calls += 1
        decisions += len(played.decisions)
        last_s = played.call.at
    cut = "; its end is cut off" if recording.is_cut else ""
    ended = "" if recording.ended is None else f"; it ended before the router: {recording.ended}"
    calls_made = f"{calls} calls of the scheduler in {last_s - first_s:.1f} s, {decisions} decisions"
    sys.stdout.write(f"{calls_made}: all are the same{cut}{ended}\n")
    return 0


def _print_differences(played: Played, began_s: float) -> None:
    call = played.call
    sys.stdout.write(
        f"call {played.number}, {call.at - began_s:.3f} s after the start, of scheduler {call.scheduler}:\n"
    )
    for event in call.events[:_MOST_SHOWN]:
        sys.stdout.write(f"  heard     {_short(event)}\n")
    for difference in played.differences[:_MOST_SHOWN]:
        sys.stdout.write(f"  decision {difference.place + 1}:\n")
        sys.stdout.write(f"    recorded  {_short(difference.recorded)}\n")
        sys.stdout.write(f"    now       {_short(difference.played)}\n")
    if (more := len(played.differences) - _MOST_SHOWN) > 0:
        sys.stdout.write(f"  {more} more decisions of this call differ\n")


def _short(value: object) -> str:
    if value is None:
        return "nothing"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
