"""The commands of shards as blocks, and what happens to requests as marks, since they were taken last."""

from collections.abc import Callable, Iterable
from typing import Any

from caravan_proto.messages.commands import (
    Command,
    Decode,
    Evaluate,
    FilterBatch,
    Load,
    Prefill,
    Save,
    SetLayout,
)
from caravan_proto.messages.results import LayoutSet, Loaded, Saved, StepOutcome
from caravan_scheduler.actions import Action, Deliver, Drafted, Fail, Fetch, Preempt, Resume, Start
from caravan_scheduler.events import (
    Cancelled,
    CommandEnded,
    Event,
    Fetched,
    ShardDraining,
    ShardJoined,
    ShardLost,
    Stepped,
    Submitted,
)
from caravan_scheduler.scheduler import Scheduler
from caravan_scheduler.shard.command import InFlight
from caravan_studio.timeline.figures import RecentFigures
from caravan_studio.timeline.messages import Block, BlockKind, Chunk, Mark, Moved, What

_KINDS: dict[type, BlockKind] = {
    Prefill: "prefill",
    Decode: "decode",
    Evaluate: "evaluate",
    Save: "save",
    Load: "load",
    SetLayout: "layout",
    FilterBatch: "release",
}
_DELIVERIES = (Deliver, Drafted)
# More marks than these in a frame are no picture.
_MOST_MARKS = 1000


class _Going:
    """A command under way, and what came of it since the last frame."""

    __slots__ = (
        "accepted", "busy_s", "command", "drafted", "failed", "first_tokens", "forward_s", "fresh", "prompt_tokens",
        "sequences", "start_s", "steps", "tokens",
    )  # fmt: skip

    def __init__(self, command: Command, sequences: dict[int, int], began_s: float) -> None:
        """``sequences``: the requests that it names, by sequence id."""
        self.command = command
        self.sequences = sequences
        self.prompt_tokens = 0
        # When the requests arrived that get their first token by it.
        self.first_tokens: list[float] = []
        self.restart(began_s)

    def restart(self, start_s: float) -> None:
        self.start_s = start_s
        self.steps = self.tokens = self.drafted = self.accepted = self.failed = 0
        self.busy_s = self.forward_s = 0.0
        # Whether anything is to be told that was not.
        self.fresh = False


class Lanes:
    """Follows the commands of ``scheduler`` and tells ``figures``. A step costs it a few microseconds."""

    def __init__(self, scheduler: Scheduler, figures: RecentFigures, now: float) -> None:
        self._scheduler = scheduler
        self._figures = figures
        self._going: dict[int, _Going] = {}
        # Transfers by id: when each began, and what it is.
        self._fetches: dict[int, tuple[float, Fetch]] = {}
        self._blocks: list[Block] = []
        self._marks: list[Mark] = []
        self._on: dict[type, Callable[[Any, float], None]] = {
            Stepped: self._step,
            CommandEnded: self._end,
            Saved: self._reply,
            Loaded: self._reply,
            LayoutSet: self._reply,
            Submitted: self._submit,
            Cancelled: self._cancel,
            Fetched: self._fetched,
            ShardJoined: self._join,
            ShardLost: self._lose,
            ShardDraining: self._drain,
            Start: self._start,
            Resume: self._resume,
            Preempt: self._preempt,
            Fail: self._fail,
            Fetch: self._fetch,
            **dict.fromkeys(_KINDS, self._begin),
        }
        for shard in scheduler.shards.values():
            for command in shard.commands.in_flight:
                self._note_begun(command, now)

    def note(self, events: Iterable[Event], actions: list[Action], now: float) -> None:
        """Note what happened, and what the scheduler decided then."""
        on = self._on
        for event in events:
            if (handle := on.get(type(event))) is not None:
                handle(event, now)
        # Deliveries come first, and there is one for each token.
        first = len(actions)
        while first and type(actions[first - 1]) not in _DELIVERIES:
            first -= 1
        for action in actions[first:]:
            if (handle := on.get(type(action))) is not None:
                handle(action, now)

    def take(self, now: float) -> tuple[list[Block], list[Mark]]:
        """Return what is new, and begin anew."""
        for going in self._going.values():
            if going.fresh:
                self._tell(going, now)
        blocks, marks = self._blocks, self._marks
        self._blocks, self._marks = [], []
        return blocks, marks

    # Commands

    def _begin(self, command: Command, now: float) -> None:
        shard = self._scheduler.shards.get(command.shard)
        begun = None if shard is None else shard.commands.find(command.command_id)
        if begun is not None:
            self._note_begun(begun, now)

    def _note_begun(self, begun: InFlight, now: float) -> None:
        command = begun.command
        sequences = {key: resident.request_id for key, resident in begun.residents.items()}
        going = self._going[command.command_id] = _Going(command, sequences, now)
        if isinstance(command, Prefill):
            going.prompt_tokens = sum([len(chunk.token_ids) for chunk in command.chunks])
            lasts = [begun.residents[chunk.sequence_id].sequence for chunk in command.chunks if chunk.last]
            going.first_tokens = [sequence.request.arrived_s for sequence in lasts if not sequence.output]

    def _step(self, step: Stepped, now: float) -> None:
        going = self._going.get(step.command_id)
        if going is None:
            return
        if not going.fresh:
            going.start_s = now - step.seconds
            going.fresh = True
        going.busy_s += step.seconds
        going.forward_s += step.forward_s
        if step.outcome is not StepOutcome.OK:
            going.failed += 1
            return
        going.steps += 1
        tokens = len(step.tokens)
        going.tokens += tokens
        for _, count in step.drafts:
            going.drafted += count.drafted
            going.accepted += count.accepted
        figures = self._figures
        if going.prompt_tokens:
            figures.note_prompt(now, going.prompt_tokens)
        for arrived_s in going.first_tokens:
            figures.note_first_token(now, now - arrived_s)
        figures.note_step(step.shard, now, tokens, max(0, tokens - len(going.first_tokens)))
        for sequence_id, token in step.tokens:
            if token.finish is not None:
                self._mark(now, "end", going.sequences.get(sequence_id, 0), step.shard)

    def _reply(self, reply: Saved | Loaded | LayoutSet, now: float) -> None:
        going = self._going.get(reply.command_id)
        if going is not None:
            going.start_s = now - reply.seconds
            going.busy_s = reply.seconds
            going.fresh = True

    def _end(self, ended: CommandEnded, now: float) -> None:
        going = self._going.pop(ended.command_id, None)
        if going is not None and (going.fresh or isinstance(going.command, FilterBatch)):
            self._tell(going, now)

    def _tell(self, going: _Going, now: float) -> None:
        command = going.command
        self._blocks.append(
            Block(
                shard=command.shard,
                kind=_KINDS[type(command)],
                command=command.command_id,
                start=round(going.start_s, 6),
                end=round(now, 6),
                steps=going.steps,
                busy=round(going.busy_s, 6),
                forward=round(going.forward_s, 6),
                tokens=going.tokens,
                drafted=going.drafted,
                accepted=going.accepted,
                failed=going.failed,
                chunks=_chunks(command, going.sequences),
                riders=_riders(command, going.sequences),
                moved=_moved(command, going.sequences),
            )
        )
        going.restart(now)

    # Transfers

    def _fetch(self, fetch: Fetch, now: float) -> None:
        self._fetches[fetch.transfer_id] = (now, fetch)

    def _fetched(self, fetched: Fetched, now: float) -> None:
        if (known := self._fetches.pop(fetched.transfer_id, None)) is not None:
            _, fetch = known
            self._blocks.append(
                Block(
                    shard=fetch.target,
                    kind="fetch",
                    command=fetch.transfer_id,
                    start=round(now - fetched.seconds, 6),
                    end=round(now, 6),
                    busy=round(fetched.seconds, 6),
                    failed=int(not all(fetched.fetched)),
                    bytes=fetch.size_bytes,
                    source=fetch.source,
                )
            )

    # Marks

    def _mark(self, now: float, what: What, request: int, shard: str = "", number: int = 0) -> None:
        if len(self._marks) < _MOST_MARKS:
            self._marks.append(Mark(round(now, 6), what, request, shard, number))

    def _submit(self, event: Submitted, now: float) -> None:
        self._mark(now, "submit", event.request.request_id, number=len(event.request.spec.prompt))

    def _cancel(self, event: Cancelled, now: float) -> None:
        self._mark(now, "cancel", event.request_id)

    def _start(self, action: Start, now: float) -> None:
        if len(self._marks) < _MOST_MARKS:
            computed = action.recomputed.by_reason
            mark = Mark(round(now, 6), "start", action.request_id, action.shard, action.cached_tokens, computed)
            self._marks.append(mark)
        self._figures.note_start(now, action.prompt_tokens, action.cached_tokens)

    def _resume(self, action: Resume, now: float) -> None:
        self._mark(now, "resume", action.request_id, action.shard, action.computed_again)

    def _preempt(self, action: Preempt, now: float) -> None:
        self._mark(now, "swap" if action.how.value == "swap" else "recompute", action.request_id)

    def _fail(self, action: Fail, now: float) -> None:
        self._mark(now, "fail", action.request_id, action.reason.value)

    # Shards

    def _join(self, event: ShardJoined, now: float) -> None:
        self._forget(event.shard)
        self._mark(now, "join", 0, event.shard)

    def _lose(self, event: ShardLost, now: float) -> None:
        self._forget(event.shard)
        self._mark(now, "lost", 0, event.shard)

    def _drain(self, event: ShardDraining, now: float) -> None:
        self._mark(now, "drain", 0, event.shard)

    def _forget(self, shard: str) -> None:
        self._figures.forget(shard)
        self._going = {key: going for key, going in self._going.items() if going.command.shard != shard}
        self._fetches = {
            key: known for key, known in self._fetches.items() if shard not in (known[1].source, known[1].target)
        }


def _chunks(command: Command, sequences: dict[int, int]) -> list[Chunk]:
    if not isinstance(command, Prefill):
        return []
    return [
        Chunk(sequences[chunk.sequence_id], chunk.start, len(chunk.token_ids), chunk.last) for chunk in command.chunks
    ]


def _riders(command: Command, sequences: dict[int, int]) -> list[int]:
    if isinstance(command, Prefill):
        return [sequences[key] for key in command.ride]
    return list(sequences.values()) if isinstance(command, Decode | Evaluate) else []


def _moved(command: Command, sequences: dict[int, int]) -> list[Moved]:
    if not isinstance(command, Save | Load):
        return []
    return [Moved(sequences.get(entry.sequence_id, 0), entry.end - entry.start) for entry in command.entries]
