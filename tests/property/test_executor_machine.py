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
class Twin:
    """A conversation, and what it must be. ``kept``: after how many of the last tokens logits are kept."""

    real: Conversation
    tokens: list[int] = field(default_factory=list)
    state: State = State.IDLE
    kept: int = 0


class ExecutorMachine(RuleBasedStateMachine):
    twins = Bundle("twins")

    def __init__(self) -> None:
        super().__init__()
        self.executor = Executor(
            "toy.gguf", backend="fake", ctx_size=_CELLS, parallel=_SEQUENCES, batch_size=_BATCH, cache_ram=0
        )
        self.alive: list[Twin] = []

    def teardown(self) -> None:
        self.executor.close()

    def _refused(self, twin: Twin, *states: State) -> type[caravan.CaravanError] | None:
        """Return the error of a call that needs one of ``states``; None if the call fits."""
        if twin.state in states:
            return None
        return {
            State.ENDED: caravan.ConversationEnded,
            State.PENDING: caravan.NeedsInfer,
            State.IDLE: caravan.NeedsPrompt,
        }[twin.state]

    @rule(target=twins)
    def create(self) -> Twin:
        twin = Twin(self.executor.create())
        self.alive.append(twin)
        return twin

    @rule(twin=twins, tokens=_TOKENS, all_logits=st.booleans())
    def prompt(self, twin: Twin, tokens: list[int], all_logits: bool) -> None:
        if twin.state in (State.PENDING, State.ENDED):
            error = caravan.AlreadyPrompted if twin.state is State.PENDING else caravan.ConversationEnded
            with pytest.raises(error):
                twin.real.prompt(tokens, all_logits=all_logits)
        elif len(twin.tokens) + len(tokens) > _CELLS:
            with pytest.raises(caravan.TooLong):
                twin.real.prompt(tokens, all_logits=all_logits)
        else:
            twin.real.prompt(tokens, all_logits=all_logits)
            twin.tokens += tokens
            twin.state, twin.kept = State.PENDING, len(tokens) if all_logits else 1

    @rule(twin=twins)
    def prompt_nothing(self, twin: Twin) -> None:
        if twin.state is State.IDLE and twin.tokens:
            twin.real.prompt([])
            twin.state, twin.kept = State.PENDING, 1
        else:
            with pytest.raises((caravan.ConversationError, caravan.RequestError)):
                twin.real.prompt([])

    @rule()
    def infer(self) -> None:
        waiting = {twin.real for twin in self.alive if twin.state is State.PENDING}
        did = self.executor.infer()
        groups = (did.done, did.waiting, did.starved)
        assert set().union(*groups) == waiting
        assert sum(map(len, groups)) == len(waiting)
        if waiting and not did.done and not did.waiting:
            assert did.starved
        for twin in self.alive:
            if twin.real in did.done:
                twin.state = State.READY

    @rule()
    def infer_all(self) -> None:
        """Make room as a user would, until all is computed."""
        for _ in range(100):
            self.infer()
            if all(twin.state is not State.PENDING for twin in self.alive):
                return
            if not self._progresses():
                for twin in self.alive:
                    twin.real.unload()
        raise AssertionError("it never ends")

    def _progresses(self) -> bool:
        before = [twin.real.held for twin in self.alive]
        self.infer()
        return before != [twin.real.held for twin in self.alive]

    @rule(twin=twins)
    def sample(self, twin: Twin) -> None:
        if (error := self._refused(twin, State.READY)) is not None:
            with pytest.raises(error):
                twin.real.sample()
            return
        token = twin.real.sample()
        assert token.id == int(logits_after(twin.tokens).argmax())

    @rule(target=twins, twin=twins)
    def fork(self, twin: Twin) -> Twin:
        if twin.state is State.ENDED:
            with pytest.raises(caravan.ConversationEnded):
                twin.real.fork()
            return twin
        other = Twin(twin.real.fork(), list(twin.tokens), twin.state, twin.kept)
        self.alive.append(other)
        return other

    @rule(twin=twins, count=st.integers(0, 14))
    def rewind(self, twin: Twin, count: int) -> None:
        if (error := self._refused(twin, State.IDLE, State.READY)) is not None:
            with pytest.raises(error):
                twin.real.rewind(count)
        elif count > len(twin.tokens):
            with pytest.raises(ValueError, match="there are"):
                twin.real.rewind(count)
        elif count:
            twin.real.rewind(count)
            del twin.tokens[len(twin.tokens) - count :]
            twin.state = State.IDLE

    @rule(twin=twins, count=st.integers(0, 6), keep=st.integers(0, 6))
    def shift_left(self, twin: Twin, count: int, keep: int) -> None:
        if (error := self._refused(twin, State.IDLE, State.READY)) is not None:
            with pytest.raises(error):
                twin.real.shift_left(count, keep)
        elif keep + count > len(twin.tokens):
            with pytest.raises(ValueError, match="there are"):
                twin.real.shift_left(count, keep)
        else:
            twin.real.shift_left(count, keep)
            self._replace(twin, twin.tokens[:keep] + twin.tokens[keep + count :])

    @rule(twin=twins, at=st.integers(0, 8), tokens=_TOKENS)
    def modify(self, twin: Twin, at: int, tokens: list[int]) -> None:
        new = twin.tokens[:at] + tokens + twin.tokens[at + 2 :]
        if (error := self._refused(twin, State.IDLE, State.READY)) is not None:
            with pytest.raises(error):
                twin.real.modify(lambda _: new)
        elif len(new) > _CELLS:
            with pytest.raises(caravan.TooLong):
                twin.real.modify(lambda _: new)
        else:
            twin.real.modify(lambda _: new)
            self._replace(twin, new)

    def _replace(self, twin: Twin, tokens: list[int]) -> None:
        if tokens != twin.tokens:
            twin.tokens, twin.kept = tokens, 1
            twin.state = State.PENDING if tokens else State.IDLE

    @rule(twin=twins)
    def unload(self, twin: Twin) -> None:
        if twin.state is not State.ENDED:
            twin.real.unload()

    @rule(target=twins, twin=twins)
    def save_and_load(self, twin: Twin) -> Twin:
        if twin.state is State.ENDED:
            with pytest.raises(caravan.ConversationEnded):
                twin.real.save()
            return twin
        other = Twin(self.executor.load(twin.real.save()), list(twin.tokens), twin.state, twin.kept)
        self.alive.append(other)
        return other

    @rule(twin=consumes(twins))
    def close(self, twin: Twin) -> None:
        twin.real.close()
        twin.real.close()
        if twin in self.alive:
            self.alive.remove(twin)
        twin.state = State.ENDED
        with pytest.raises(caravan.ConversationEnded):
            twin.real.prompt([1])

    @precondition(lambda self: self.alive)
    @rule(twin=twins)
    def refuse_an_id(self, twin: Twin) -> None:
        with pytest.raises((caravan.RequestError, caravan.ConversationError)):
            twin.real.prompt([VOCABULARY_SIZE])

    @invariant()
    def conversations_are_what_they_must_be(self) -> None:
        assert [twin.real for twin in self.alive] == list(self.executor.conversations)
        for twin in self.alive:
            assert (twin.real.tokens, twin.real.state) == (twin.tokens, twin.state)
            if twin.state is State.READY:
                for offset in range(twin.kept):
                    expected = logits_after(twin.tokens[: len(twin.tokens) - offset])
                    assert np.array_equal(twin.real.logits(offset), expected)
                with pytest.raises(IndexError):
                    twin.real.logits(twin.kept)

    @invariant()
    def cells_are_those_that_are_held(self) -> None:
        backend, held = self.executor.backend, [twin.real for twin in self.alive if twin.real.sequence_id is not None]
        assert len({one.sequence_id for one in held}) == len(held) <= _SEQUENCES
        assert all(one.held for one in held)
        lengths = {one.sequence_id: one.held for one in held}
        assert [backend.length(number) for number in range(_SEQUENCES)] == [
            lengths.get(number, 0) for number in range(_SEQUENCES)
        ]


TestExecutor = ExecutorMachine.TestCase
TestExecutor.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
