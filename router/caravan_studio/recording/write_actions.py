"""Writes what the scheduler decides as plain lists, which are compared with what it decides when it is played again."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, assert_never

from caravan_proto.messages.commands import (
    Chunk,
    Decode,
    Evaluate,
    FilterBatch,
    Header,
    Load,
    Prefill,
    PrefixCopy,
    Row,
    Save,
    SequenceParameters,
    SetLayout,
)
from caravan_proto.messages.media import MediaSpan
from caravan_scheduler.actions import (
    Action,
    Deliver,
    Drafted,
    Drained,
    Encode,
    Fail,
    Faulted,
    Fetch,
    Flushed,
    Joins,
    Left,
    PinAnswered,
    Preempt,
    Resume,
    Start,
)
from caravan_scheduler.core.prefixes import ShardPrefixes

Plain = list[Any]


class ActionNames(Protocol):
    """The names that a recording has for what is in actions."""

    def token(self, token: int) -> int: ...
    def tokens(self, tokens: Iterable[int]) -> list[int]: ...
    def key(self, key: bytes) -> int: ...
    def medium(self, media_id: bytes) -> int: ...
    def tenant(self, name: str) -> str: ...


def write_actions(actions: Sequence[Action], names: ActionNames) -> list[Plain]:
    """Return each action as its name and its fields, with the names of the recording."""
    return [_write(action, names) for action in actions]


def _write(action: Action, names: ActionNames) -> Plain:
    match action:
        case Deliver():
            tokens = [names.token(token.token_id) for token in action.tokens]
            finish = action.tokens[-1].finish if action.tokens else None
            ends = None if finish is None else finish.value
            return ["deliver", action.request_id, len(action.prompt_logprobs), tokens, ends]
        case Drafted():
            return [
                "drafted",
                action.request_id,
                action.count.source.value,
                action.count.drafted,
                action.count.accepted,
            ]
        case Prefill():
            chunks = [_chunk(chunk, names) for chunk in action.chunks]
            return ["prefill", *_command(action, names), chunks, list(action.ride)]
        case Decode():
            ids = list(action.sequence_ids)
            return ["decode", *_command(action, names), ids, action.max_steps, action.max_draft_tokens]
        case Evaluate():
            return ["evaluate", *_command(action, names), [_row(row, names) for row in action.rows]]
        case FilterBatch():
            return ["filter", *_command(action, names), list(action.keep)]
        case Save():
            saved = [
                [
                    entry.sequence_id,
                    entry.start,
                    [[position, names.key(key)] for position, key in entry.cuts],
                    entry.release,
                    names.key(entry.own_note.before),
                ]
                for entry in action.entries
            ]
            return ["save", *_command(action, names), saved]
        case Load():
            loaded = [
                [
                    entry.sequence_id,
                    _sent(entry.token_ids, entry.media, names),
                    [[names.key(piece.key), piece.start, piece.end] for piece in entry.slices],
                    entry.adapter,
                    _copy(entry.copy),
                    *_spans(entry.media, names),
                ]
                for entry in action.entries
            ]
            return ["load", *_command(action, names), loaded]
        case SetLayout():
            return ["layout", *_command(action, names), None if action.layout is None else action.layout.value]
        case Joins():
            return ["joins", action.reason.value]
        case Fetch():
            keys = [names.key(key) for key in action.keys]
            return ["fetch", action.transfer_id, action.source, action.target, keys, action.size_bytes]
        case Encode():
            return ["encode", action.encode_id, action.shard, names.medium(action.media.id)]
        case Drained():
            return ["drained", action.shard]
        case Start():
            return ["start", action.request_id, action.shard, action.prompt_tokens, action.cached_tokens]
        case Resume():
            return ["resume", action.request_id, action.shard, action.computed_again]
        case Fail():
            return ["fail", action.request_id, action.reason.value]
        case Faulted():
            return ["faulted", type(action.error).__name__, list(action.request_ids), action.is_rebuilt]
        case Preempt():
            return ["preempt", action.request_id, action.how.value]
        case Left():
            return ["left", [sequence.request_id for sequence in action.sequences]]
        case Flushed():
            return ["flushed", action.flush_id, [_evicted(one, names) for one in action.evicted]]
        case PinAnswered():
            refusal = action.refusal
            told = None if refusal is None else [refusal.limit_bytes, refusal.needed_bytes]
            return ["pinned", action.pin_id, told]
        case _:
            assert_never(action)


def _command(
    command: Prefill | Decode | Evaluate | FilterBatch | Save | Load | SetLayout, names: ActionNames
) -> tuple[str, int, Plain]:
    return command.shard, command.command_id, _header(command.header, names)


def _header(header: Header, names: ActionNames) -> Plain:
    if not (header.release or header.park or header.drop_runs or header.spill_runs):
        return []
    spilled = [names.key(key) for key in header.spill_runs]
    dropped = [names.key(key) for key in header.drop_runs]
    return [list(header.release), [list(pair) for pair in header.park], dropped, spilled]


def _copy(copy: PrefixCopy | None) -> Plain | None:
    return None if copy is None else [copy.source_id, copy.length]


def _chunk(chunk: Chunk, names: ActionNames) -> Plain:
    setup = None if chunk.setup is None else _setup(chunk.setup, names)
    tokens, media = _sent(chunk.token_ids, chunk.media, names), _spans(chunk.media, names)
    return [chunk.sequence_id, chunk.start, tokens, chunk.last, setup, _copy(chunk.copy), *media]


def _sent(tokens: Sequence[int], media: Sequence[MediaSpan], names: ActionNames) -> list[int]:
    """Return tokens as they are sent. Those under ``media`` are 0, which is no token there."""
    written: list[int] = []
    for span in media:
        written += names.tokens(tokens[len(written) : span.offset])
        written += tokens[span.offset : span.end]
    return written + names.tokens(tokens[len(written) :])


def _spans(media: Sequence[MediaSpan], names: ActionNames) -> Plain:
    """Return the spans as one more field if there are any."""
    spans = [
        [span.offset, names.medium(span.media_id), span.slice_index, span.first, span.count, span.positions]
        for span in media
    ]
    return [spans] if spans else []


def _setup(setup: SequenceParameters, names: ActionNames) -> Plain:
    """Return what the scheduler fills in; the other parameters are the request's own."""
    return [
        setup.prompt_length,
        setup.max_length,
        setup.adapter,
        setup.prompt_logprobs,
        setup.max_draft_tokens,
        names.tokens(setup.prediction),
        bool(setup.draft_pool),
        setup.feedback,
    ]


def _row(row: Row, names: ActionNames) -> Plain:
    return [
        row.sequence_id,
        row.start,
        _sent(row.token_ids, row.media, names),
        None if row.outputs is None else row.outputs.value,
        row.adapter,
        row.top_n_tokens,
        row.keep_length,
        _copy(row.copy),
        *_spans(row.media, names),
    ]


def _evicted(evicted: ShardPrefixes, names: ActionNames) -> Plain:
    """Return what was given up, in an order that does not depend on keys, which differ from recording to replay."""
    prefixes = sorted(
        [one.last_used_s, one.tokens, one.cells, one.memory_bytes, one.disk_bytes, names.tenant(one.tenant), one.pinned]
        for one in evicted.prefixes
    )
    return [evicted.shard, evicted.cells, evicted.memory_bytes, evicted.disk_bytes, evicted.pinned_bytes, prefixes]
