"""What the scheduler remembers of prompts that it has started: hashes of their tokens, and what became of their cells.

The tokens themselves are gone with the cells and the saved runs that hold them.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from caravan_scheduler.core.tokens import common_length
from caravan_scheduler.prefix_keys import BLOCK_TOKENS
from caravan_scheduler.prefix_tree import PrefixTree
from caravan_scheduler.sequence import Sequence

# Limits of what is remembered of one tenant: sequences, and blocks of them. A block that sequences share counts once,
# and takes some 40 bytes.
_MOST_PROMPTS = 128
_MOST_BLOCKS = 1 << 16
_MOST_TENANTS = 256
# Most sequences that are compared by tokens with a prompt. Of more, those that end soonest are compared by hashes only:
# where the prompt differs is known to a block.
MOST_COMPARED = 4

# Returns the tokens [start, stop) of a sequence, or of what there is of it; None if nobody holds them any more.
TokensOf = Callable[["KnownPrompt", int, int], tuple[int, ...] | None]


class Fate(Enum):
    """What became of the cells of a sequence."""

    # It has not ended.
    LIVE = "live"
    # They were kept for others, until they made way.
    KEPT = "kept"
    NOT_KEPT = "not_kept"
    # The shard that kept them is gone.
    LOST = "lost"


@dataclass(slots=True, eq=False, kw_only=True)
class KnownPrompt:
    """A sequence that was started. ``length``: its first tokens that were computed, or will be if it is live.

    ``weights``: which of the models that had the name it was for.
    ``tail``: hash of those behind the last whole block. ``prompt_tail``: the length of its prompt, and the hash of what
    is behind the prompt's last whole block. ``shard`` and ``sequence_id``: where it was last, once it has ended.
    ``kept``: how many of its first tokens were kept. ``saved_key``: names the run that was saved last of it.
    """

    request_id: int
    weights: int
    namespace: str
    adapter: str
    length: int
    tail: int
    prompt_tail: tuple[int, int]
    shard: str
    fate: Fate = Fate.LIVE
    sequence_id: int = -1
    kept: int = 0
    saved_key: bytes | None = None

    def end(self, length: int, tail: int, place: tuple[str, int], *, is_kept: bool) -> None:
        """Note that it has ended on the shard and under the id of ``place``, and whether it was kept for others."""
        self.length, self.tail, (self.shard, self.sequence_id) = length, tail, place
        self.fate, self.kept = (Fate.KEPT, length) if is_kept else (Fate.NOT_KEPT, 0)

    def give_up(self) -> None:
        """Note that it has ended on no shard."""
        if self.fate is Fate.LIVE:
            self.fate = Fate.NOT_KEPT

    def lose(self) -> None:
        """Note that the shard that kept it is gone."""
        if self.fate is Fate.KEPT:
            self.fate = Fate.LOST

    def save(self, key: bytes) -> None:
        """Note the key of the last run that was saved of it."""
        self.saved_key = key


@dataclass(frozen=True, slots=True)
class Nearest:
    """The sequences of a namespace that have most first tokens in common with a prompt: so many.

    ``is_exact``: no more are in common. Else the first difference is somewhere behind, within that block of
    `BLOCK_TOKENS`: nobody holds the tokens any more, or more than `MOST_COMPARED` go on otherwise. ``is_whole``: one of
    the sequences ends there, so that the prompt continues it. ``prompts``: these sequences and others that share the
    last whole block, each with how many first tokens are known to be in common.
    """

    length: int = 0
    is_exact: bool = True
    is_whole: bool = True
    prompts: tuple[tuple[KnownPrompt, int], ...] = ()


NOTHING = Nearest()


def _tail(sequence: Sequence, length: int) -> int:
    return hash(sequence.tokens(length - length % BLOCK_TOKENS, length))


def _no_tokens(_prompt: KnownPrompt, _start: int, _stop: int) -> None:
    return None


class _Block:
    """The block of a prompt at ``start``, up to which earlier sequences have all in common with it, and not much more.

    ``hash_of``: returns the hash that a sequence has of this block, None if it ends in it.
    """

    def __init__(self, prompt: tuple[int, ...], start: int, hash_of: Callable[[int], int | None]) -> None:
        self.prompt_length = len(prompt)
        self._prompt = prompt
        self._start = start
        self._hash_of = hash_of
        # What sequences have here, of those whose tokens somebody holds, and how much of it they have in common.
        self.seen: dict[tuple[int, ...], int] = {}

    def common(self, one: KnownPrompt, tokens_of: TokensOf) -> int | None:
        """Return how many first tokens ``one`` has in common with the prompt; None if nobody holds its tokens."""
        prompt, start = self._prompt, self._start
        stop = min(one.length, start + BLOCK_TOKENS)
        tokens = tokens_of(one, start, stop)
        if tokens is None:
            if stop <= len(prompt) and self._is_same(one, prompt[start:stop]):
                return stop
            # Another has the same tokens.
            tokens = next(
                (seen[: stop - start] for seen in self.seen if self._is_same(one, seen[: stop - start])), None
            )
        if tokens is not None:
            if (common := self.seen.get(tokens)) is None:
                common = self.seen[tokens] = start + common_length(tokens, prompt[start:stop])
            return common
        length, tail = one.prompt_tail
        return length if length == len(prompt) < stop and hash(prompt[start:]) == tail else None

    def _is_same(self, one: KnownPrompt, tokens: tuple[int, ...]) -> bool:
        """Whether ``one`` has these tokens here, up to the end of the block or to its own."""
        if self._start + len(tokens) != min(one.length, self._start + BLOCK_TOKENS):
            return False
        known = self._hash_of(one.request_id)
        return hash(tokens) == (one.tail if known is None else known)


def _nearest(block: _Block, start: int, found: tuple[KnownPrompt, ...], tokens_of: TokensOf) -> Nearest:
    """Return how much ``found``, which have the first ``start`` tokens in common with a prompt, have beyond that."""
    length, is_whole, unknown = start, False, found[:MOST_COMPARED]
    known: list[tuple[KnownPrompt, int]] = []
    # Twice, since the tokens of one tell what another has.
    for _ in range(2):
        left = []
        for one in unknown:
            common = block.common(one, tokens_of)
            if common is None:
                left.append(one)
                continue
            known.append((one, common))
            if common >= length:
                is_whole = common == one.length or (is_whole and common == length)
                length = common
        unknown = tuple(left)
        if not block.seen:
            break
    unknown += found[MOST_COMPARED:]
    is_exact = not unknown or length == block.prompt_length
    # What nobody holds any more may go on with the prompt beyond the end of another.
    return Nearest(length, is_exact, is_whole and is_exact, (*known, *((one, start) for one in unknown)))


@dataclass(slots=True)
class _Tenant:
    """``prompts``: by request id, the oldest first. ``tree``: has hashes of blocks in place of tokens.

    ``found``: the last request that was looked up in its own namespace, the tree's version then, and what was found.
    """

    prompts: OrderedDict[int, KnownPrompt] = field(default_factory=OrderedDict)
    namespaces: Counter[str] = field(default_factory=Counter)
    tree: PrefixTree = field(default_factory=PrefixTree)
    found: tuple[int, int, int, tuple[int, ...]] = (-1, -1, 0, ())

    def look_up(self, sequence: Sequence, namespace: str) -> tuple[int, tuple[int, ...]]:
        """Return how many first blocks of a prompt are known, and some of those that have them."""
        blocks = sequence.block_hashes(len(sequence.spec.prompt))
        length, sources = self.tree.nearest(namespace, blocks, MOST_COMPARED + 1)
        if namespace == sequence.request.prefix_namespace:
            self.found = (sequence.request_id, self.tree.version, length, sources)
        return length, sources

    def add(self, prompt: KnownPrompt, sequence: Sequence) -> None:
        request_id, version, length, sources = self.found
        if (request_id, version) != (prompt.request_id, self.tree.version):
            length, sources = self.look_up(sequence, prompt.namespace)
        self._insert(prompt, sources, length)
        self.tree.extend(prompt.request_id, sequence.block_hashes(prompt.length, length))
        self.prompts[prompt.request_id] = prompt
        self.namespaces[prompt.namespace] += 1
        while len(self.prompts) > _MOST_PROMPTS or (self.tree.cells > _MOST_BLOCKS and len(self.prompts) > 1):
            self.remove(next(iter(self.prompts)))

    def _insert(self, prompt: KnownPrompt, sources: tuple[int, ...], length: int) -> None:
        if length:
            self.tree.fork(prompt.request_id, sources[0], length)
        else:
            self.tree.insert(prompt.request_id, prompt.namespace)

    def grow(self, sequence: Sequence, length: int) -> None:
        """Let a prompt have the first ``length`` tokens of ``sequence``, more or fewer than it has."""
        request_id, blocks = sequence.request_id, length // BLOCK_TOKENS
        known = self.tree.length(request_id)
        if blocks < known:
            self.tree.truncate(request_id, blocks)
        elif blocks > known:
            if self.tree.has_behind(request_id, sequence.block_hashes(length, known)[0]):
                # With nodes of its own it would not be found beside those that have the same.
                prompt = self.prompts[request_id]
                self.tree.remove(request_id)
                known, sources = self.tree.nearest(prompt.namespace, sequence.block_hashes(length), 1)
                self._insert(prompt, sources, known)
            self.tree.extend(request_id, sequence.block_hashes(length, known))

    def remove(self, request_id: int) -> None:
        prompt = self.prompts.pop(request_id, None)
        if prompt is not None:
            self.tree.remove(request_id)
            self.namespaces[prompt.namespace] -= 1
            if not self.namespaces[prompt.namespace]:
                del self.namespaces[prompt.namespace]


class KnownPrompts:
    """The sequences that were started last, of each tenant apart. Those shorter than a block are not remembered."""

    def __init__(self, before: "KnownPrompts | None" = None) -> None:
        """``before``: those of a model of the same name with other weights, which goes on for some time. Both share
        what they remember.
        """
        self.weights: int = 0 if before is None else before.weights + 1
        # By name, least recently used first.
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict() if before is None else before._tenants

    # Questions

    def nearest(self, sequence: Sequence, tokens_of: TokensOf, namespace: str | None = None) -> Nearest:
        """Return what has most in common with the prompt of ``sequence`` in ``namespace``, by default its own."""
        tenant = self._tenants.get(sequence.spec.tenant.name)
        if tenant is None:
            return NOTHING
        prompt = sequence.spec.prompt
        tree = tenant.tree
        length, sources = tenant.look_up(sequence, namespace or sequence.request.prefix_namespace)
        if not length:
            return NOTHING
        found = tuple(tenant.prompts[source] for source in sources)
        start = length * BLOCK_TOKENS
        if start == len(prompt):
            is_whole = any(one.length == start for one in found)
            return Nearest(start, is_whole=is_whole, prompts=tuple((one, start) for one in found))
        block = _Block(prompt, start, lambda request_id: tree.token(request_id, length))
        return _nearest(block, start, found, tokens_of if len(found) <= MOST_COMPARED else _no_tokens)

    def other_namespaces(self, sequence: Sequence) -> list[str]:
        """Return in which other namespaces the tenant of ``sequence`` has had prompts."""
        tenant = self._tenants.get(sequence.spec.tenant.name)
        own = sequence.request.prefix_namespace
        return [] if tenant is None else [name for name in tenant.namespaces if name != own]

    # Changes

    def start(self, sequence: Sequence, shard: str) -> None:
        """Remember a prompt, which ``shard`` begins to compute."""
        length = len(sequence.spec.prompt)
        name = sequence.spec.tenant.name
        tenant = self._tenants.pop(name, None) or _Tenant()
        self._tenants[name] = tenant
        if len(self._tenants) > _MOST_TENANTS:
            self._tenants.popitem(last=False)
        tail = _tail(sequence, length)
        prompt = KnownPrompt(
            request_id=sequence.request_id,
            weights=self.weights,
            namespace=sequence.request.prefix_namespace,
            adapter=sequence.spec.adapter,
            length=length,
            tail=tail,
            prompt_tail=(length, tail),
            shard=shard,
        )
        tenant.add(prompt, sequence)

    def end(self, sequence: Sequence, computed: int, place: tuple[str, int], *, is_kept: bool) -> None:
        """Note that a sequence has ended, the first ``computed`` tokens of which others may find if it ``is_kept``.

        ``place``: the shard, and its id there.
        """
        tenant = self._tenants.get(sequence.spec.tenant.name)
        prompt = None if tenant is None else tenant.prompts.get(sequence.request_id)
        if tenant is None or prompt is None:
            return
        if computed < BLOCK_TOKENS:
            tenant.remove(sequence.request_id)
            return
        prompt.end(computed, _tail(sequence, computed), place, is_kept=is_kept)
        tenant.grow(sequence, computed)

    def forget_live(self, sequence: Sequence) -> None:
        """Note that a sequence is gone. If its end was not noted, it was on no shard: nothing was kept of it."""
        tenant = self._tenants.get(sequence.spec.tenant.name)
        prompt = None if tenant is None else tenant.prompts.get(sequence.request_id)
        if prompt is not None and prompt.weights == self.weights:
            prompt.give_up()

    def note_saved(self, sequence: Sequence, key: bytes) -> None:
        """Note the last run that was saved of a sequence, which may have ended."""
        tenant = self._tenants.get(sequence.spec.tenant.name)
        prompt = None if tenant is None else tenant.prompts.get(sequence.request_id)
        if prompt is not None:
            prompt.save(key)

    def note_lost(self, shard: str) -> None:
        """Note that a shard is gone with all it kept."""
        for tenant in self._tenants.values():
            for prompt in tenant.prompts.values():
                if prompt.shard == shard and prompt.weights == self.weights:
                    prompt.lose()
