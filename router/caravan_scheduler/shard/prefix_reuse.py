"""What a sequence need not compute on a shard: prefixes that are in its cells, or saved."""

from collections.abc import Collection
from dataclasses import replace

from caravan_scheduler.prefix_tree import NO_MATCH, Match
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import ShardAccount
from caravan_scheduler.shard.saved_runs import NO_PREFIX, SavedPrefix

# What a Load costs beside the copy, in seconds: a command of its own.
LOAD_S = 0.002
# Copying a split sequence moves all of its cells. Moving this many takes as long as computing one token.
_CELLS_PER_TOKEN = 256
_LEAST_COPY = 16


def find_match(shard: ShardAccount, sequence: Sequence) -> Match:
    """Find the longest prefix of ``sequence`` that can be copied. Its last token is always computed.

    While it waits, it is looked for once per change of what the shard holds.
    """
    tree = shard.cells.tree
    version = tree.version + shard.stays.version  # grows with each change of either
    known = sequence.matches.get(shard.name)
    if known is not None and known[0] is tree and known[1] == version:
        return known[2]
    found = _look_up(shard, sequence)
    sequence.matches[shard.name] = (tree, version, found)
    return found


def _look_up(shard: ShardAccount, sequence: Sequence) -> Match:
    tree = shard.cells.tree
    namespace, tokens = sequence.request.prefix_namespace, sequence.tokens(0, sequence.known_tokens)
    if shard.layout.whole_only:
        most = min(len(tokens) - 1, sequence.most_with_logprobs)
        found = tree.match_whole(namespace, tokens, most)
    else:
        most = sequence.most_cached
        found = tree.match(namespace, tokens, most)
        if found.length < most and _index_outputs(shard, found.within):
            found = tree.match(namespace, tokens, most)
    sources = tuple(filter(shard.stays.can_be_copied, found.sources))
    length = sequence.border(found.length)
    if not sources or (length < found.length and shard.layout.whole_only):
        return NO_MATCH
    return Match(length, min(length, found.live_length), sources) if length else NO_MATCH


def _index_outputs(shard: ShardAccount, sequence_ids: tuple[int, ...]) -> bool:
    """Let the tree learn what those of these sequences that run have generated. Return whether there was any."""
    residents = shard.stays.residents
    found = [residents[key] for key in sequence_ids if key in residents]
    grown = [shard.cells.index(resident) for resident in found if resident.is_running]
    return any(grown)


def find_saved(shard: ShardAccount, sequence: Sequence) -> SavedPrefix:
    """Return the longest prefix of ``sequence`` that ``shard`` has saved and that may come from a cache."""
    keys, known = sequence.keys, sequence.known_tokens
    found = shard.runs.find(keys, known, sequence.most_cached)
    border = sequence.border(found.length)
    return found if border == found.length else shard.runs.find(keys, known, border)


def held_length(shard: ShardAccount, sequence: Sequence, most: int) -> int:
    """Return how many of the first ``most`` tokens ``shard`` has, in cells or saved, whether or not that is of use.

    Changes nothing. What a running sequence has generated may be missing.
    """
    tree, namespace, tokens = shard.cells.tree, sequence.request.prefix_namespace, sequence.tokens(0, most)
    match = tree.match_whole if shard.layout.whole_only else tree.match
    in_cells, keys, known = match(namespace, tokens, most).length, sequence.keys, sequence.known_tokens
    if not shard.runs.has_beginning(keys, known):
        return in_cells
    return max(in_cells, shard.runs.find(keys, known, most).length)


def saved_prefix(shard: ShardAccount, sequence: Sequence, match: Match) -> SavedPrefix:
    """Find the longest saved prefix of ``sequence`` if loading it is faster than computing what ``match`` lacks."""
    if not shard.saves.are_possible:
        return NO_PREFIX
    found = find_saved(shard, sequence)
    if found.length <= match.length:
        return NO_PREFIX
    load_s = LOAD_S + copy_s(shard, found.length - shared_by_load(shard, sequence, match, found).length)
    compute_s = (found.length - match.length) * shard.costs.recompute_token_s
    if sequence.spec.media is not None:
        compute_s += shard.media.encode_s(sequence.spec.media.within(match.length, found.length))
    return found if load_s < compute_s else NO_PREFIX


def copy_s(shard: ShardAccount, cells: int) -> float:
    """Return the expected seconds until ``cells`` of a sequence, and its state if it has one, are saved or loaded."""
    return shard.costs.copy_s(cells, states=0 if shard.runs.states is None else 1)


def shared_by_load(shard: ShardAccount, sequence: Sequence, match: Match, saved: SavedPrefix) -> Match:
    """Return ``match``, with one source, if ``sequence`` can begin with those cells and its rest be loaded.

    Where sequences have recurrent state, ``match`` is of whole sequences. Their cells can be shared in part, since the
    state is loaded. No match if cells are not shared, or if the source is parked and its id or its other cells are
    needed.
    """
    if not shard.layout.shares_cells:
        return NO_MATCH
    if shard.runs.states is not None:
        tokens = sequence.tokens(0, saved.length - 1)  # at least one cell is loaded
        found = shard.cells.tree.match(sequence.request.prefix_namespace, tokens, len(tokens))
        length = sequence.border(found.length)
        sources = tuple(filter(shard.stays.can_be_copied, found.sources)) if length else ()
        match = Match(length, min(length, found.live_length), sources)
    if not match.sources:
        return NO_MATCH
    source_id = next((key for key in match.sources if key in shard.stays.residents), match.sources[0])
    shared = replace(match, sources=(source_id,))
    return shared if has_id_for(shard, shared) and has_cells_for_load(shard, sequence, shared) else NO_MATCH


def has_id_for(shard: ShardAccount, match: Match) -> bool:
    """Whether a sequence that starts from ``match`` can get an id without evicting what the next command copies."""
    stays = shard.stays
    if stays.free_sequences <= 0:
        return False
    if stays.free_ids or stays.releasing:
        return True
    return any(one.sequence_id not in match.sources[:1] for one in shard.header.evictable)


def has_id_beside(shard: ShardAccount, held: Collection[int]) -> bool:
    """Whether there is an id for another sequence that is not among those ``held`` for others."""
    stays = shard.stays
    return bool(stays.free_ids or stays.releasing) or any(key not in held for key in stays.parked)


def has_cells_for_load(shard: ShardAccount, sequence: Sequence, shared: Match) -> bool:
    """Whether ``sequence`` has room behind ``shared`` if nothing is evicted that the next command copies."""
    if not shard.layout.shares_cells:
        return True
    evictable = [one.sequence_id for one in shard.header.evictable if one.sequence_id not in shared.sources]
    return shard.cells.free + shard.cells.tree.own_cells(evictable) >= sequence.known_tokens - shared.length


def worth_copying(shard: ShardAccount, match: Match) -> Match:
    """Return ``match``, or no match where copying would cost more than computing."""
    layout = shard.layout
    if layout.shares_cells or match.length >= max(_LEAST_COPY, layout.cells_per_sequence // _CELLS_PER_TOKEN):
        return match
    return NO_MATCH


def from_spared(shard: ShardAccount, match: Match) -> Match:
    """Return ``match`` with the sources last that should make way, since those that are copied cannot."""
    spared = shard.header.spared
    if not spared or len(match.sources) < 2:
        return match
    stays = (*shard.stays.residents, *spared)
    return replace(match, sources=tuple(sorted(match.sources, key=lambda source: source not in stays)))


def to_take_over(shard: ShardAccount, match: Match, target: int) -> int | None:
    """Return the parked source in whose place a sequence of ``target`` tokens should start; None: beside any."""
    stays, cells = shard.stays, shard.cells
    parked = next((key for key in match.sources if key in stays.parked and key not in shard.header.spared), None)
    if parked is None or parked in shard.header.sources:
        return None
    held = cells.tree.length(parked)
    if match.length == held or (not shard.layout.shares_cells and stays.parked[parked].is_expendable):
        return parked  # nothing is lost
    has_others = len(shard.header.evictable) > 1
    if not stays.free_ids and not stays.releasing and (not has_others or 2 * match.length >= held):
        return parked
    evictable = cells.held - cells.live - (held - match.live_length)
    return parked if cells.free + max(0, evictable) < target - match.length else None
