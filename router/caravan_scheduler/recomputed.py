"""Finds why tokens of a prompt are computed, once, when its request starts.

position 0 .... cached .......... common .............. end ... length
                      evicted, on      differs, or new      the end of a prompt, which is always computed
                      another shard, ...
"""

from collections.abc import Mapping
from dataclasses import dataclass

from caravan_scheduler.core.recomputed import Part, Reason, Recomputed
from caravan_scheduler.known_prompts import Fate, KnownPrompt, KnownPrompts, Nearest
from caravan_scheduler.prefix_keys import BLOCK_TOKENS
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.prefix_reuse import held_length
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.shard.saved_runs import KeptRun


@dataclass(frozen=True, slots=True)
class Fleet:
    """The shards by name, and the requests that have not ended by id, of which the reasons are looked up."""

    known: KnownPrompts
    shards: Mapping[str, ShardAccount]
    sequences: Mapping[int, Sequence]

    def _parked(self, prompt: KnownPrompt) -> Resident | None:
        shard = self.shards.get(prompt.shard)
        parked = None if shard is None else shard.stays.parked.get(prompt.sequence_id)
        return parked if parked is not None and parked.request_id == prompt.request_id else None

    def tokens_of(self, prompt: KnownPrompt, start: int, stop: int) -> tuple[int, ...] | None:
        """Return tokens of an earlier prompt, as long as anybody holds them."""
        if (sequence := self.sequences.get(prompt.request_id)) is not None:
            return sequence.tokens(start, stop)
        if (parked := self._parked(prompt)) is not None:
            return parked.sequence.tokens(start, stop) if parked.computed >= stop else None
        if prompt.saved_key is not None:
            for shard in self.shards.values():
                tokens = _saved_tokens(shard.runs.holding(prompt.saved_key), start, stop)
                if len(tokens) == stop - start:
                    return tuple(tokens)
        return None


def _saved_tokens(runs: tuple[KeptRun, ...], start: int, stop: int) -> list[int]:
    """Return the tokens [start, stop) of the prefix that ``runs`` hold, as far as they have them without a gap."""
    tokens: list[int] = []
    for run in runs:
        first = max(start, run.start)
        # A run may begin inside the one before it, and goes on otherwise there.
        del tokens[first - start :]
        if start + len(tokens) == first:
            tokens += run.note.tokens[first - run.start : max(0, stop - run.start)]
    return tokens


class _Parts:
    """Parts of a prompt from the cached tokens on, each of which begins where the one before it ends."""

    def __init__(self, start: int) -> None:
        self.position = start
        self.found: list[Part] = []

    def up_to(self, end: int, reason: Reason) -> None:
        if end > self.position:
            self.found.append(Part(reason, self.position, end - self.position))
            self.position = end


def recomputed_by(fleet: Fleet, shard: ShardAccount, resident: Resident) -> Recomputed:
    """Return why ``resident``, which begins on ``shard``, computes the tokens of its prompt that are not cached."""
    sequence = resident.sequence
    length = len(sequence.spec.prompt)
    cached = min(length, resident.cached)
    end = max(cached, sequence.border(max(0, length - 2)))
    own = fleet.known.nearest(sequence, fleet.tokens_of)
    parts = _Parts(cached)
    if cached < (known := min(own.length, end)):
        _explain_known(parts, known, own, fleet, shard, resident)
    best, compared = own, [own]
    if own.length < end:
        for namespace in fleet.known.other_namespaces(sequence):
            other = fleet.known.nearest(sequence, fleet.tokens_of, namespace)
            compared.append(other)
            if other.length > max(best.length, cached):
                best = other
        if best is not own:
            is_same = any(prompt.adapter == sequence.spec.adapter for prompt, _ in best.prompts)
            parts.up_to(min(best.length, end), Reason.OTHER_SALT if is_same else Reason.OTHER_ADAPTER)
    # What is cached may be older than what is remembered.
    is_known = best.length >= cached
    is_near = is_known or (best.length > 0 and _same_block(best.length, cached))
    is_exact = all(one.is_exact or not _same_block(one.length, best.length) for one in compared)
    if parts.position < end:
        parts.up_to(length, Reason.DIFFERS if is_near and not (best.is_whole and is_exact) else Reason.NEW)
    parts.up_to(length, Reason.END)
    return Recomputed(
        parts=tuple(parts.found),
        common=max(best.length, cached),
        is_exact=is_exact and is_known,
        was_moved=sequence.fetches > 0 and cached > 0,
    )


def _same_block(a: int, b: int) -> bool:
    return a // BLOCK_TOKENS == b // BLOCK_TOKENS


def _explain_known(
    parts: _Parts, end: int, own: Nearest, fleet: Fleet, shard: ShardAccount, resident: Resident
) -> None:
    """Say why tokens up to ``end``, which earlier prompts of the same namespace have, are computed again."""
    sequence = resident.sequence
    if sequence.needs_prompt_logprobs:
        parts.up_to(end, Reason.LOGPROBS)
        return
    if resident.shared < resident.cached and end - resident.cached < BLOCK_TOKENS:
        # The longest saved prefix was loaded, and what is in cells is shorter.
        _explain_end_of_block(parts, end, own, fleet)
        if parts.position >= end:
            return
    parts.up_to(min(end, held_length(shard, sequence, end)), Reason.NOT_WORTH_COPYING)
    others = (held_length(one, sequence, end) for one in fleet.shards.values() if one is not shard)
    parts.up_to(min(end, max(others, default=0)), Reason.OTHER_SHARD)
    # Cells of a model with recurrent state cannot be cut back: of use are only those that end within what is common.
    is_whole = shard.layout.whole_only
    for prompt, common in own.prompts:
        if prompt.weights == fleet.known.weights and prompt.fate is Fate.LIVE and not is_whole:
            parts.up_to(min(end, common), Reason.UNDER_WAY)
    _explain_end_of_block(parts, end, own, fleet)
    if parts.position >= end:
        return
    newest = sorted(own.prompts, key=lambda entry: (entry[0].weights, entry[0].request_id), reverse=True)
    for prompt, common in newest:
        kept = min(prompt.kept, common) if not is_whole or prompt.kept <= common else 0
        if prompt.weights != fleet.known.weights:
            parts.up_to(min(end, common), Reason.NEW_WEIGHTS)
        else:
            parts.up_to(min(end, kept), Reason.SHARD_LOST if prompt.fate is Fate.LOST else Reason.EVICTED)
    parts.up_to(end, Reason.NEVER_SAVED)


def _explain_end_of_block(parts: _Parts, end: int, own: Nearest, fleet: Fleet) -> None:
    """Say that what is left up to ``end`` is saved but for its place in a block, if so."""
    for prompt, common in own.prompts:
        stop = min(end, common)
        if 0 < stop - parts.position < BLOCK_TOKENS and fleet.tokens_of(prompt, parts.position, stop) is not None:
            parts.up_to(stop, Reason.PART_OF_BLOCK)
