"""A request and its sequence of tokens, which outlives its stays on shards."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from caravan_proto.messages.media import MediaSpan
from caravan_scheduler.core.generation import BULK_PRIORITY, GenerationSpec
from caravan_scheduler.core.prompt_media import without_cells
from caravan_scheduler.core.tokens import PromptToken, block_hashes, common_length
from caravan_scheduler.job import Job, ParkedSequence
from caravan_scheduler.lifetimes import Lifetime
from caravan_scheduler.prefix_keys import BLOCK_TOKENS, PrefixKeys
from caravan_scheduler.prefix_tree import Match, PrefixTree

if TYPE_CHECKING:
    from caravan_scheduler.beams import BeamGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A generation that a client waits for. ``request_id`` grows with arrival.

    The times are seconds on the scheduler's clock. The request fails if it has not started by ``start_by_s`` or has not
    ended by ``end_by_s``.
    """

    request_id: int
    spec: GenerationSpec
    arrived_s: float = 0.0
    start_by_s: float = math.inf
    end_by_s: float = math.inf

    @property
    def prefix_namespace(self) -> str:
        """Requests with the same namespace share cells of equal prefixes."""
        spec = self.spec
        # Neither part contains a line break, so two different pairs never make the same name.
        return f"{spec.adapter}\n{spec.namespace}" if spec.adapter else spec.namespace

    @property
    def peak_cells(self) -> int:
        """The most cells it ever holds: the last token is sampled and never computed."""
        return self.spec.max_length - 1


@dataclass(slots=True, eq=False)
class Account:
    """``counter``: the tokens that were computed for a tenant, divided by its weight, or for a session of it."""

    counter: float = 0.0


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and its tokens so far: all that is needed to compute it again on any shard."""

    request: Request
    # Those of the request; kept here because they are read for every token.
    request_id: int = field(init=False)
    spec: GenerationSpec = field(init=False)
    output: list[int] = field(default_factory=list)
    # Whether it runs only where nothing else does. A beam search runs as a whole, like any other request.
    is_bulk: bool = field(init=False)
    # How many requests behind this one started while it had no room.
    bypassed: int = 0
    # What mirostat or adaptive-p carries to its next token, as of its last one; None without them. It comes with the
    # tokens and goes with them to the next shard, since it cannot be computed from them.
    feedback: float | None = None
    # How often it lost its cells by a failure since its last token.
    losses: int = 0
    # Positions that the shard ``fatal_on`` was computing for it when it was lost, and how often in a row shards were
    # lost there.
    fatal: range = range(0)
    fatal_losses: int = 0
    fatal_on: str = ""
    # It was on a shard before.
    started: bool = False
    # What its session was charged.
    account: Account = field(default_factory=Account)
    # It was charged for the tokens before this position; computing them again is free.
    charged: int = 0
    # How many of its first tokens were computed before its last stay ended.
    reached: int = 0
    # It waits, and this shard saved its cells; empty if none did.
    saved_on: str = ""
    # How many transfers of its prefix from shard to shard it has waited for since its last stay.
    fetches: int = 0
    # The logprobs of its first prompt tokens, and how many of them were delivered. Those that another request with the
    # same first tokens has computed are delivered with the next ones.
    prompt_logprobs: list[PromptToken] = field(default_factory=list)
    prompt_logprobs_delivered: int = 0
    # How many first tokens it shares with other requests, by request id: found by placement while it waits.
    common: dict[int, int] = field(default_factory=dict)
    # What shards hold of it, by name, with the tree and the version in which this was found, while it waits.
    matches: dict[str, tuple[PrefixTree, int, Match]] = field(default_factory=dict)
    keys: PrefixKeys = field(init=False)
    # Until when it may wait for its prefix although a shard is open to it; None if it has not waited yet.
    prefix_awaited_until_s: float | None = None
    # The beam search that it belongs to.
    group: "BeamGroup[Sequence] | None" = None
    # What it belongs to, and the parked sequence of that which it continues, until it has started.
    job: Job | None = None
    continues: ParkedSequence | None = None
    _prefix_hashes: list[int] = field(default_factory=list)
    _block_hashes: list[int] = field(default_factory=list)
    _prompt_hashes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.request_id, self.spec = self.request.request_id, self.request.spec
        self.is_bulk = self.spec.priority <= BULK_PRIORITY and self.spec.beams is None
        if (continued := self.spec.continued) is not None:
            self.output, self.feedback = [*continued.token_ids], continued.feedback
        self.keys = PrefixKeys(self.request.prefix_namespace, self.tokens)

    def rewrite(self, output: list[int]) -> None:
        """Replace the output, which a beam search does when a branch ends."""
        self.output = output
        self._prefix_hashes.clear()
        self._block_hashes.clear()
        self.matches.clear()
        self.common.clear()
        self.keys = PrefixKeys(self.request.prefix_namespace, self.tokens)

    def limit_thought(self) -> bool:
        """Let the thought have no more tokens than the output. Return whether that may change what follows."""
        thought, known = self.spec.thought, len(self.output)
        if thought is None or not thought.ending or (thought.max_tokens is not None and thought.max_tokens <= known):
            return False
        self.spec = replace(self.spec, thought=replace(thought, max_tokens=known))
        return True

    def note_lost_media(self) -> None:
        """Note that media of it were not encoded when they were to be computed, or could not be."""
        self.losses += 1

    @property
    def lifetime(self) -> Lifetime | None:
        """How long what is computed of it should stay; None if nobody asked for that."""
        return Lifetime(self.spec.tenant, self.spec.keep_s) if self.spec.keep_s else None

    @property
    def known_tokens(self) -> int:
        """Number of tokens of prompt and output so far."""
        return len(self.spec.prompt) + len(self.output)

    @property
    def kept(self) -> ParkedSequence | None:
        """The parked sequence that it continues, if that is still there."""
        return self.continues if self.continues is not None and self.continues.is_parked else None

    @property
    def goes_on(self) -> bool:
        """Whether its job had an answer before."""
        return self.job is not None and self.job.length > 0

    @property
    def lost_a_shard(self) -> bool:
        """Whether a shard was lost while it computed this sequence, which has got no token since."""
        return self.losses > 0 and self.fatal_losses > 0

    @property
    def most_shared(self) -> int:
        """The most first tokens that need not be computed; the others are computed before the next token is drawn.

        They are computed as they would be without a cache, because sums may round otherwise: the last tokens of a
        prompt together, the last one of an output alone.
        """
        return self.border(self.known_tokens - 1 if self.output else max(0, self.known_tokens - 2))

    @property
    def most_cached(self) -> int:
        """The most first tokens that may come from a cache now."""
        return self.border(min(self.most_shared, self.most_with_logprobs))

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether logprobs of its prompt are missing, so that it starts only from a prefix whose logprobs are known."""
        return self.spec.prompt_logprobs and len(self.prompt_logprobs) < len(self.spec.prompt)

    @property
    def most_with_logprobs(self) -> int:
        """The most first tokens that may come from a cache if prompt logprobs are missing, else all.

        The logprob of the first token that is computed must be known, since the logits before it are not.
        """
        return max(0, len(self.prompt_logprobs) - 1) if self.needs_prompt_logprobs else self.known_tokens

    def can_share_prompt_logprobs(self, other: "Sequence") -> bool:
        """Whether the prompt logprobs of ``other`` serve this sequence too, where both have the same tokens."""
        spec = other.spec
        return spec.prompt_logprobs and spec.sampling.top_n_tokens == self.spec.sampling.top_n_tokens

    def add_prompt_logprobs(self, start: int, tokens: Iterable[PromptToken]) -> None:
        """Add what is not known yet of the logprobs of prompt tokens from ``start`` on, which is known or the next."""
        self.prompt_logprobs.extend(itertools.islice(tokens, len(self.prompt_logprobs) - start, None))

    @property
    def prompt_hashes(self) -> tuple[int, ...]:
        """Hashes of the prefixes of its prompt."""
        if self._prompt_hashes is None:
            self._prompt_hashes = self.prefix_hashes(len(self.spec.prompt))
        return self._prompt_hashes

    def hashed_in_common(self, other: "Sequence") -> int:
        """Return how many first tokens of both prompts are equal as far as their hashes tell."""
        own, theirs = self.prompt_hashes, other.prompt_hashes
        for place in range(min(len(own), len(theirs)) - 1, -1, -1):
            if own[place] == theirs[place]:  # then those before it are, too
                return BLOCK_TOKENS << place
        return 0

    def continues_prompt_of(self, other: "Sequence") -> bool:
        """Whether its prompt begins with that of ``other``, except what a template puts before the answer."""
        own, theirs = self.spec.prompt, other.spec.prompt
        least = len(theirs) - BLOCK_TOKENS
        if not 0 < least < len(own) or other.request.prefix_namespace != self.request.prefix_namespace:
            return False
        # The hash of at least half of that differs for almost all others. This runs for every parked sequence of a key.
        half = ((least - 1) // (2 * BLOCK_TOKENS)).bit_length()
        if self.prompt_hashes[half : half + 1] != other.prompt_hashes[half : half + 1]:
            return False
        return common_length(own[: len(theirs)], theirs, self.hashed_in_common(other)) >= least

    def prefix_hashes(self, length: int) -> tuple[int, ...]:
        """Return hashes of prefixes of 1, 2, 4, ... blocks of its first ``length`` tokens, which are known.

        Equal hashes of the same place are equal prefixes, practically. They differ from process to process.
        """
        count = (length // BLOCK_TOKENS).bit_length()
        known = self._prefix_hashes
        while len(known) < count:
            before = known[-1] if known else hash(self.request.prefix_namespace)
            end = BLOCK_TOKENS << len(known)
            known.append(hash((before, self.tokens(end // 2 if known else 0, end))))
        return tuple(known[:count])

    def block_hashes(self, length: int, first: int = 0) -> list[int]:
        """Return a hash of each whole block of `BLOCK_TOKENS` among its first ``length`` tokens, which are known.

        Begin with the block ``first``. A hash tells nothing of the tokens before its block, nor of the namespace.
        """
        known, whole = self._block_hashes, length // BLOCK_TOKENS
        if whole > len(known):
            start = len(known) * BLOCK_TOKENS
            known += block_hashes(self.tokens(start, whole * BLOCK_TOKENS), BLOCK_TOKENS)
        return known[first:whole]

    def take_block_hashes(self, other: "Sequence", length: int) -> None:
        """Take from ``other``, whose first ``length`` tokens are the same, the hashes that it has of their blocks."""
        if other.group is not None:  # whose output may be another by now
            length = min(length, len(other.spec.prompt))
        whole = min(length // BLOCK_TOKENS, len(other._block_hashes))
        if whole > len(self._block_hashes):
            self._block_hashes = other._block_hashes[:whole]

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        """Return the known tokens at positions [start, stop)."""
        prompt = self.spec.prompt
        behind = stop - len(prompt)
        if behind <= 0:
            return prompt[start:stop]
        return prompt[start:] + tuple(self.output[max(0, start - len(prompt)) : behind])

    def sent(self, start: int, stop: int) -> tuple[tuple[int, ...], tuple[MediaSpan, ...]]:
        """Return the known tokens at positions [start, stop) as a shard gets them, and the spans of media in them."""
        tokens, media = self.tokens(start, stop), self.spec.media
        if media is None:
            return tokens, ()
        return without_cells(tokens, media, start), media.within(start, stop)

    def border(self, position: int) -> int:
        """Return the last place up to ``position`` where a chunk may end, and a prefix that others share."""
        media = self.spec.media
        return position if media is None else media.border(position)

    def with_borders(self, cuts: list[int], start: int) -> list[int]:
        """Return ``cuts`` behind ``start``, and the places between them where media begin that cannot be cut."""
        media = self.spec.media
        if media is None or not media.atomic:
            return cuts
        return sorted({*cuts, *(span.offset for span in media.spans if start < span.offset < cuts[-1])})
