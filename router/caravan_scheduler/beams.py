"""A beam search over the sequences of one shard: which beams continue, and when the search has ended.

It follows ``GenerationMixin._beam_search`` of Hugging Face's transformers 5: in each step the likeliest continuations
of all beams are ranked by the sum of their logprobs. The best that do not end become the next beams. One that ends
counts if its rank is below the width. Beams of equal rank keep the order of their parents, and of their tokens there.
"""

import math
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from caravan_proto.messages.results import FinishReason
from caravan_scheduler.core.generation import EarlyStopping, GenerationSpec
from caravan_scheduler.core.tokens import Alternative, GeneratedToken, common_length


class Member(Protocol):
    """What a search needs of the sequence that holds a beam."""

    output: list[int]

    @property
    def spec(self) -> GenerationSpec: ...
    @property
    def known_tokens(self) -> int: ...
    def rewrite(self, output: list[int]) -> None: ...


M = TypeVar("M", bound=Member)


class Hypothesis(NamedTuple):
    """An output and its score. The last token has a finish reason if the output has ended."""

    score: float
    tokens: tuple[GeneratedToken, ...]


@dataclass(frozen=True, slots=True)
class _Beam:
    total: float = 0.0
    tokens: tuple[GeneratedToken, ...] = ()


class Branch(NamedTuple):
    """A beam begins with the first ``length`` tokens of the sequence of member ``parent``."""

    parent: int
    length: int


class BeamGroup(Generic[M]):
    """The sequences of a beam search, by index: each holds the prompt and the tokens of one beam.

    Only the first one, the leader, waits in the queue; it starts alone. Others branch off once the prompt is computed.
    A beam that ends gives its sequence to a branch of another, so that there are never more than ``width``. The group
    loses its cells as a whole. Its beams continue when the leader has been computed again.
    """

    def __init__(self, leader: M) -> None:
        search = leader.spec.beams
        assert search is not None, "no beam search"
        self.search = search
        self.width = search.width
        self.members: list[M] = []
        self.join(leader)
        # Best first, by member.
        self._beams: dict[int, _Beam] = {0: _Beam()}
        # The likeliest next tokens of members whose tokens are all computed.
        self._next: dict[int, tuple[Alternative, ...]] = {}
        # The beginnings of members that have no place on the shard.
        self._branches: dict[int, Branch] = {}
        # Ended outputs, best first; at most ``width``.
        self._ended: list[Hypothesis] = []

    def join(self, member: M) -> None:
        """Add the next member."""
        assert member.spec.beams is not None
        assert member.spec.beams.index == len(self.members), f"member {member.spec.beams.index} out of order"
        self.members.append(member)

    @property
    def leader(self) -> M:
        return self.members[0]

    @property
    def is_whole(self) -> bool:
        """Whether all members were submitted."""
        return len(self.members) == self.width

    @property
    def branches(self) -> dict[int, Branch]:
        """The members that have a beam and no place yet."""
        return self._branches

    @property
    def beams(self) -> list[int]:
        """The members that have a beam, best first."""
        return list(self._beams)

    @property
    def most_output_cells(self) -> int:
        """Cells that the outputs of all members take at most: the last token of each is never computed."""
        return self.width * (self.leader.spec.stopping.max_new_tokens - 1)

    @property
    def cells_to_branch(self) -> int:
        """Cells that branches without a place will take for the tokens that they have."""
        return sum(self.members[index].known_tokens - branch.length for index, branch in self._branches.items())

    @property
    def top_n_tokens(self) -> int:
        """How many of the likeliest next tokens a step needs of each beam.

        Among them are ``width`` that end nothing, and as many as the client wants to see.
        """
        spec = self.leader.spec
        return max(self.width + len(self._end_token_ids), spec.sampling.top_n_tokens)

    @property
    def _end_token_ids(self) -> frozenset[int]:
        stopping = self.leader.spec.stopping
        return stopping.stop_token_ids if stopping.ignore_eos else stopping.stop_token_ids | self.search.eos_token_ids

    def index_of(self, member: M) -> int:
        """Return the place of ``member`` in the group."""
        assert member.spec.beams is not None
        return member.spec.beams.index

    def note_placed(self, member: M) -> None:
        """Note that ``member`` has a place on the shard."""
        self._branches.pop(self.index_of(member), None)

    def note_next(self, member: M, likeliest: tuple[Alternative, ...]) -> bool:
        """Note the next tokens of ``member``. Return whether those of all beams are known."""
        self._next[self.index_of(member)] = likeliest
        return len(self._next) == len(self._beams)

    def restart(self) -> None:
        """Note that the cells of all members are lost."""
        self._next.clear()
        own = self.leader
        self._branches = {
            index: Branch(0, len(own.spec.prompt) + common_length(self.members[index].output[:-1], own.output))
            for index in self._beams
            if index > 0
        }

    def advance(self) -> list[M] | None:
        """Choose the next beams and give each a sequence. Return the members whose cells hold no beam any more.

        None if the search has ended: `best` returns the outputs.
        """
        length = len(next(iter(self._beams.values())).tokens) + 1
        is_last = length == self.leader.spec.stopping.max_new_tokens
        kept: list[tuple[int, _Beam]] = []
        for rank, (total, index, likely) in enumerate(self._ranked()):
            if len(kept) == self.width or (is_last and rank == self.width):
                break
            token = self._token(likely, index, is_last=is_last)
            if token.finish is None:
                kept.append((index, _Beam(total, (*self._beams[index].tokens, token))))
            elif rank < self.width:
                self._ended.append(self._hypothesis(_Beam(total, (*self._beams[index].tokens, token))))
        self._ended = sorted(self._ended, key=lambda one: -one.score)[: self.width]
        self._next.clear()
        if is_last or not kept or self._is_over(kept[0][1], length):
            return None
        return self._continue(kept)

    def _ranked(self) -> list[tuple[float, int, Alternative]]:
        """Return the continuations of all beams, best first: sum of logprobs, member, next token."""
        found = [
            (beam.total + likely.logprob, index, likely)
            for index, beam in self._beams.items()
            for likely in self._next[index]
        ]
        return sorted(found, key=lambda one: -one[0])

    def _token(self, likely: Alternative, index: int, *, is_last: bool) -> GeneratedToken:
        spec = self.leader.spec
        token_id, shown = likely.token_id, spec.sampling.logprobs
        finish = FinishReason.LENGTH if is_last else None
        if token_id in self._end_token_ids:
            finish = FinishReason.STOP_TOKEN if token_id in spec.stopping.stop_token_ids else FinishReason.EOS_TOKEN
        return GeneratedToken(
            token_id,
            likely.piece,
            likely.special,
            likely.logprob if shown else None,
            self._next[index][: spec.sampling.top_n_tokens] if shown else (),
            finish,
        )

    def _hypothesis(self, beam: _Beam) -> Hypothesis:
        return Hypothesis(self._score(beam.total, len(beam.tokens)), beam.tokens)

    def _score(self, total: float, length: int) -> float:
        return total / math.pow(length, self.search.length_penalty)

    def _is_over(self, best: _Beam, length: int) -> bool:
        """Whether the search ends, whose best running beam has ``length`` tokens."""
        if len(self._ended) < self.width:
            return False
        search = self.search
        if search.early_stopping is EarlyStopping.YES:
            return True
        if search.early_stopping is EarlyStopping.NEVER and search.length_penalty > 0:
            length = self.leader.spec.stopping.max_new_tokens
        return self._score(best.total, length) <= self._ended[-1].score

    def _continue(self, kept: list[tuple[int, _Beam]]) -> list[M]:
        """Give the beams ``kept`` their sequences: the first child of a member keeps its own."""
        parents = {index for index, _ in kept}
        free = (index for index in range(self.width) if index not in parents)
        beams: dict[int, _Beam] = {}
        for parent, beam in kept:
            token_id = beam.tokens[-1].token_id
            if parent not in beams:
                beams[parent] = beam
                continue
            index = next(free)
            beams[index] = beam
            self._branches[index] = Branch(parent, self.members[parent].known_tokens)
            self.members[index].rewrite([*self.members[parent].output, token_id])
        for index in parents:
            self.members[index].output.append(beams[index].tokens[-1].token_id)
        self._beams = beams
        return [self.members[index] for index in self._branches]

    def best(self) -> list[Hypothesis]:
        """Return the outputs by score, best first. Those of running beams are among them if too few have ended."""
        missing = self.width - len(self._ended)
        running = [self._hypothesis(beam) for beam in self._beams.values() if beam.tokens][:missing]
        return sorted([*self._ended, *running], key=lambda one: -one.score)
