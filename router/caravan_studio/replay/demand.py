"""What a recording tells of clients and shards, apart from what the scheduler made of it."""

from collections import Counter
from dataclasses import dataclass, field, replace
from statistics import median

from caravan_proto.messages.results import StepOutcome
from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.events import ShardLimits
from caravan_scheduler.sequence import Request
from caravan_studio.recording import events as form
from caravan_studio.recording.names import media_id_of
from caravan_studio.recording.read_events import read_request
from caravan_studio.recording.write_actions import Plain
from caravan_studio.replay.measured_times import MeasuredStep, MeasuredTimes, measure
from caravan_studio.replay.outcome import Outcome
from caravan_studio.replay.player import Played, Player

# A pause of a shard that is longer than this is no part of a step.
_MOST_OVERHEAD_S = 0.1
# Fewer steps of a shard do not tell what others take.
_FEWEST_STEPS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as it came, and when its client left before it had ended."""

    request: Request
    left_s: float | None = None


@dataclass(frozen=True, slots=True)
class ShardChange:
    """A shard joined, if it has ``limits``; else it drained, or was lost."""

    at_s: float
    shard: str
    limits: ShardLimits | None = None
    drains: bool = False


@dataclass(slots=True)
class _Reported:
    """The steps of a shard that were reported at ``at_s``, and when those before them were."""

    at_s: float
    before_s: float | None = None
    steps: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Demand:
    """What one scheduler had to do. ``outputs``: tokens of each request's output. ``seen``: what its clients saw.

    ``left_out``: how many requests cannot be played in virtual time. ``steps``: those of each shard, and what
    they took. ``cell_s``: seconds to copy a cell. ``overhead_s``: what passes between two steps of a busy shard.
    """

    config: SchedulerConfig
    asked: dict[int, Asked] = field(default_factory=dict)
    changes: list[ShardChange] = field(default_factory=list)
    outputs: Counter[int] = field(default_factory=Counter)
    ended: set[int] = field(default_factory=set)
    seen: Outcome = field(default_factory=Outcome)
    left_out: int = 0
    steps: dict[str, list[MeasuredStep]] = field(default_factory=dict)
    cell_s: float = 0.0
    until_s: float = 0.0
    # By the numbers of encodings: the ids of media. And by these, what encoding took.
    _encodings: dict[int, bytes] = field(default_factory=dict)
    _encode_s: dict[bytes, float] = field(default_factory=dict)
    _pauses: list[float] = field(default_factory=list)
    # By shard.
    _paces: dict[str, _Reported] = field(default_factory=dict)
    # By the numbers of commands: riders, tokens and pairs of a step.
    _commands: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def overhead_s(self) -> float:
        """Seconds between the steps of a busy shard; 0 if nothing tells."""
        return median(self._pauses) if self._pauses else 0.0

    def output_of(self, request: int) -> int:
        """Return how many tokens a request's output has, by guess if the recording ended before."""
        known = self.outputs[request]
        if request in self.ended or not self.ended:
            return max(1, known)
        return max(1, known, round(sum(self.outputs[one] for one in self.ended) / len(self.ended)))

    def note(self, played: Played, player: Player) -> None:
        """Note a call of the scheduler, which ``player`` has played."""
        call = played.call
        self.until_s = call.at
        for event in call.events:
            self._hear(event, call.at)
        for decision in played.decisions:
            self._see(decision, call.at)
        for shard in player.schedulers[call.scheduler].shards.values():
            self.cell_s = shard.costs.copy_cell_s

    def _hear(self, event: form.Event, at: float) -> None:
        match event:
            case form.Submit():
                self._ask(event)
            case form.Cancel():
                known = self.asked.get(event.request)
                if known is not None and event.request not in self.ended:
                    self.ended.add(event.request)
                    self.asked[event.request] = replace(known, left_s=at)
            case form.Take():
                self.left_out += len(event.requests)
            case form.Join():
                self.changes.append(ShardChange(at, event.shard, event.limits))
            case form.Lose():
                self.changes.append(ShardChange(at, event.shard))
                self._paces.pop(event.shard, None)
            case form.Drain():
                self.changes.append(ShardChange(at, event.shard, drains=True))
            case form.Encode():
                media_id = self._encodings.pop(event.encoding, None)
                if media_id is not None and event.seconds > 0:
                    self._encode_s[media_id] = event.seconds
            case form.Step():
                self._measure(event)
                self._note_pace(event, at)
            case _:
                pass

    def _ask(self, event: form.Submit) -> None:
        if event.spec.beams is not None:
            self.left_out += 1
            return
        self.asked[event.request] = Asked(request=read_request(event))
        self.seen.ask(event.request, event.arrived_s)

    def _note_pace(self, step: form.Step, at: float) -> None:
        """Note what passes between steps, several of which may be reported at once."""
        known = self._paces.setdefault(step.shard, _Reported(at))
        if at > known.at_s:
            if known.steps and known.before_s is not None:
                pause_s = (known.at_s - known.before_s - known.seconds) / known.steps
                if pause_s <= _MOST_OVERHEAD_S:
                    self._pauses += [max(0.0, pause_s)] * known.steps
            known.before_s, known.at_s, known.steps, known.seconds = known.at_s, at, 0, 0.0
        known.steps += 1
        known.seconds += step.seconds

    def _measure(self, step: form.Step) -> None:
        size = self._commands.get(step.command)
        if size is None or step.outcome is not StepOutcome.OK:
            return
        riders, tokens, pairs = size
        if not tokens:  # those that have ended meanwhile do not decode any more
            riders = min(riders, len(step.tokens)) if not step.drafts else riders
        self.steps.setdefault(step.shard, []).append(MeasuredStep(riders, tokens, pairs, step.seconds))

    def times_of(self, shard: str) -> MeasuredTimes:
        """Return what steps take on a shard; on one with few steps, what they take on all."""
        steps = self.steps.get(shard, [])
        if len(steps) < _FEWEST_STEPS:
            steps = [step for of_shard in self.steps.values() for step in of_shard]
        return measure(steps, self.cell_s)

    def encode_s(self, media_id: bytes) -> float:
        """Return how long it took to encode a medium; if nobody knows, what others took on average."""
        known = self._encode_s
        return known.get(media_id, sum(known.values()) / len(known) if known else 0.0)

    def _see(self, decision: Plain, at: float) -> None:
        if decision[0] == "deliver":
            _, request, _, tokens, ends = decision
            self.outputs[request] += len(tokens)
            self.seen.hear(request, len(tokens), at)
            if ends is not None:
                self.ended.add(request)
        elif decision[0] == "prefill":
            _, _, command, _, chunks, ride = decision
            sizes = [(len(tokens), start) for _, start, tokens, *_ in chunks]
            self._commands[command] = len(ride), sum(n for n, _ in sizes), sum(n * start for n, start in sizes)
        elif decision[0] == "decode":
            self._commands[decision[2]] = len(decision[4]), 0, 0
        elif decision[0] == "encode":
            self._encodings[decision[1]] = media_id_of(decision[3])
        elif decision[0] == "fail":
            self.ended.add(decision[1])
            self.seen.fail(decision[1])
