"""Any order of calls of an executor equals a model of lists of tokens, with few cells and few sequences.

The toy model's logits depend on every token and its position, so that a lost or mixed-up cell changes them.
"""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from numpy.typing import NDArray

import caravan
from caravan import Conversation, Executor, State
from caravan_shard.backends.toy.cache import EMPTY_STATE, next_state
from caravan_shard.backends.toy.model import VOCABULARY_SIZE, toy_logits

_CELLS = 40
_SEQUENCES = 3
_BATCH = 4
_TOKENS = st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=12)


def logits_after(tokens: list[int]) -> NDArray[np.float32]:
    state = EMPTY_STATE
    for position, token in enumerate(tokens):
        state = next_state(state, token, position)
    row: NDArray[np.float32] = toy_logits(np.array([state], np.uint64))[0]
    return row


@dataclass(eq=False)
class Pair:
    """A conversation, and what it must be. ``kept``: after how many of the last tokens logits are kept."""

    real: Conversation
    tokens: list[int] = field(default_factory=list)
    state: State = State.IDLE
    kept: int = 0


class ExecutorMachine(RuleBasedStateMachine):
    pairs = Bundle("pairs")

    def __init__(self) -> None:
        super().__init__()
        self.executor = Executor(
            "toy.gguf", backend="fake", ctx_size=_CELLS, parallel=_SEQUENCES, batch_size=_BATCH, cache_ram=0
        )
        self.alive: list[Pair] = []

    def teardown(self) -> None:
        self.executor.close()

    def _refused(self, pair: Pair, *states: State) -> type[caravan.CaravanError] | None:
        """Return the error of a call that needs one of ``states``; None if the call fits."""
        if pair.state in states:
            return None
        return {
            State.ENDED: caravan.ConversationEnded,
            State.PENDING: caravan.NeedsInfer,
            State.IDLE: caravan.NeedsPrompt,
        }[pair.state]

    @rule(target=pairs)
    def create(self) -> Pair:
        pair = Pair(self.executor.create())
        self.alive.append(pair)
        return pair

    @rule(pair=pairs, tokens=_TOKENS, all_logits=st.booleans())
    def prompt(self, pair: Pair, tokens: list[int], all_logits: bool) -> None:
        if pair.state in (State.PENDING, State.ENDED):
            error = caravan.AlreadyPrompted if pair.state is State.PENDING else caravan.ConversationEnded
            with pytest.raises(error):
                pair.real.prompt(tokens, all_logits=all_logits)
        elif len(pair.tokens) + len(tokens) > _CELLS:
            with pytest.raises(caravan.TooLong):
                pair.real.prompt(tokens, all_logits=all_logits)
        else:
            pair.real.prompt(tokens, all_logits=all_logits)
            pair.tokens += tokens
            pair.state, pair.kept = State.PENDING, len(tokens) if all_logits else 1

    @rule(pair=pairs)
    def prompt_nothing(self, pair: Pair) -> None:
        if pair.state is State.IDLE and pair.tokens:
            pair.real.prompt([])
            pair.state, pair.kept = State.PENDING, 1
        else:
            with pytest.raises((caravan.ConversationError, caravan.RequestError)):
                pair.real.prompt([])

    @rule()
    def infer(self) -> None:
        waiting = {pair.real for pair in self.alive if pair.state is State.PENDING}
        did = self.executor.infer()
        groups = (did.done, did.waiting, did.starved)
        assert set().union(*groups) == waiting
        assert sum(map(len, groups)) == len(waiting)
        if waiting and not did.done and not did.waiting:
            assert did.starved
        for pair in self.alive:
            if pair.real in did.done:
                pair.state = State.READY

    @rule()
    def infer_all(self) -> None:
        """Make room as a user would, until all is computed."""
        for _ in range(100):
            self.infer()
            if all(pair.state is not State.PENDING for pair in self.alive):
                return
            if not self._progresses():
                for pair in self.alive:
                    pair.real.unload()
        raise AssertionError("it never ends")

    def _progresses(self) -> bool:
        before = [pair.real.held for pair in self.alive]
        self.infer()
        return before != [pair.real.held for pair in self.alive]

    @rule(pair=pairs)
    def sample(self, pair: Pair) -> None:
        if (error := self._refused(pair, State.READY)) is not None:
            with pytest.raises(error):
                pair.real.sample()
            return
        token = pair.real.sample()
        assert token.id == int(logits_after(pair.tokens).argmax())

    @rule(target=pairs, pair=pairs)
    def fork(self, pair: Pair) -> Pair:
        if pair.state is State.ENDED:
            with pytest.raises(caravan.ConversationEnded):
                pair.real.fork()
            return pair
        other = Pair(pair.real.fork(), list(pair.tokens), pair.state, pair.kept)
        self.alive.append(other)
        return other

    @rule(pair=pairs, count=st.integers(0, 14))
    def rewind(self, pair: Pair, count: int) -> None:
        if (error := self._refused(pair, State.IDLE, State.READY)) is not None:
            with pytest.raises(error):
                pair.real.rewind(count)
        elif count > len(pair.tokens):
            with pytest.raises(ValueError, match="there are"):
                pair.real.rewind(count)
        elif count:
            pair.real.rewind(count)
            del pair.tokens[len(pair.tokens) - count :]
            pair.state = State.IDLE

    @rule(pair=pairs, count=st.integers(0, 6), keep=st.integers(0, 6))
    def shift_left(self, pair: Pair, count: int, keep: int) -> None:
        if (error := self._refused(pair, State.IDLE, State.READY)) is not None:
            with pytest.raises(error):
                pair.real.shift_left(count, keep)
        elif keep + count > len(pair.tokens):
            with pytest.raises(ValueError, match="there are"):
                pair.real.shift_left(count, keep)
        else:
            pair.real.shift_left(count, keep)
            self._replace(pair, pair.tokens[:keep] + pair.tokens[keep + count :])

    @rule(pair=pairs, at=st.integers(0, 8), tokens=_TOKENS)
    def modify(self, pair: Pair, at: int, tokens: list[int]) -> None:
        new = pair.tokens[:at] + tokens + pair.tokens[at + 2 :]
        if (error := self._refused(pair, State.IDLE, State.READY)) is not None:
            with pytest.raises(error):
                pair.real.modify(lambda _: new)
        elif len(new) > _CELLS:
            with pytest.raises(caravan.TooLong):
                pair.real.modify(lambda _: new)
        else:
            pair.real.modify(lambda _: new)
            self._replace(pair, new)

    def _replace(self, pair: Pair, tokens: list[int]) -> None:
        if tokens != pair.tokens:
            pair.tokens, pair.kept = tokens, 1
            pair.state = State.PENDING if tokens else State.IDLE

    @rule(pair=pairs)
    def unload(self, pair: Pair) -> None:
        if pair.state is not State.ENDED:
            pair.real.unload()

    @rule(target=pairs, pair=pairs)
    def save_and_load(self, pair: Pair) -> Pair:
        if pair.state is State.ENDED:
            with pytest.raises(caravan.ConversationEnded):
                pair.real.save()
            return pair
        other = Pair(self.executor.load(pair.real.save()), list(pair.tokens), pair.state, pair.kept)
        self.alive.append(other)
        return other

    @rule(pair=consumes(pairs))
    def close(self, pair: Pair) -> None:
        pair.real.close()
        pair.real.close()
        if pair in self.alive:
            self.alive.remove(pair)
        pair.state = State.ENDED
        with pytest.raises(caravan.ConversationEnded):
            pair.real.prompt([1])

    @precondition(lambda self: self.alive)
    @rule(pair=pairs)
    def refuse_an_id(self, pair: Pair) -> None:
        with pytest.raises((caravan.RequestError, caravan.ConversationError)):
            pair.real.prompt([VOCABULARY_SIZE])

    @invariant()
    def conversations_are_what_they_must_be(self) -> None:
        assert [pair.real for pair in self.alive] == list(self.executor.conversations)
        for pair in self.alive:
            assert (pair.real.tokens, pair.real.state) == (pair.tokens, pair.state)
            if pair.state is State.READY:
                for offset in range(pair.kept):
                    expected = logits_after(pair.tokens[: len(pair.tokens) - offset])
                    assert np.array_equal(pair.real.logits(offset), expected)
                with pytest.raises(IndexError):
                    pair.real.logits(pair.kept)

    @invariant()
    def cells_are_those_that_are_held(self) -> None:
        backend, held = self.executor.backend, [pair.real for pair in self.alive if pair.real.sequence_id is not None]
        assert len({one.sequence_id for one in held}) == len(held) <= _SEQUENCES
        assert all(one.held for one in held)
        lengths = {one.sequence_id: one.held for one in held}
        assert [backend.length(number) for number in range(_SEQUENCES)] == [
            lengths.get(number, 0) for number in range(_SEQUENCES)
        ]


TestExecutor = ExecutorMachine.TestCase
TestExecutor.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
