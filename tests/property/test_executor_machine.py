"""Any order of calls of an executor equals a model of lists of tokens, with few cells and few sequences.

The toy model's logits depend on every token and its position, so that a lost or mixed-up cell changes them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.typing import NDArray

import caravan
from caravan import Conversation, Executor, State
from caravan_proto.messages.limits import KvLayout, Saving
from caravan_shard.backends.base import DecodeOutcome
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.model import EMPTY_STATE, VOCABULARY_SIZE, ToyVocabulary, next_state, toy_logits
from caravan_testing.examples import examples

pytestmark = pytest.mark.examples

_CELLS = 40
_SEQUENCES = 3
_BATCH = 4
_TOKENS = st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=12)
_TEXTS = st.text("ab é", min_size=1, max_size=8)
_VOCABULARY = ToyVocabulary()
# The second one where its executor was closed, too.
_ENDED = (caravan.ConversationEnded, caravan.ClosedError)


@dataclass(frozen=True)
class Kind:
    """What cells can do, and whether idle conversations give way."""

    layout: KvLayout = KvLayout.UNIFIED
    whole_only: bool = False
    saving: Saving = Saving.ANY
    unload_idle: bool = False


_KINDS = (
    Kind(),
    Kind(layout=KvLayout.SPLIT),
    Kind(saving=Saving.NOTHING),
    Kind(whole_only=True, saving=Saving.WITH_STATE),
    Kind(unload_idle=True),
    Kind(unload_idle=True, saving=Saving.NOTHING),
    Kind(unload_idle=True, whole_only=True, saving=Saving.WITH_STATE),
)


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
        self.alive: list[Pair] = []
        self.executor: Executor | None = None

    @initialize(kind=st.sampled_from(_KINDS))
    def open(self, kind: Kind) -> None:
        self.kind = kind
        with patch("caravan.lowlevel.backend_loader", self._loader):
            self.executor = Executor("toy.gguf", backend="fake", unload_idle=kind.unload_idle)

    def _loader(self, _config: object) -> Callable[[], ToyBackend]:
        def load() -> ToyBackend:
            backend = ToyBackend(
                cells=_CELLS,
                max_sequences=_SEQUENCES,
                max_batch_tokens=_BATCH,
                layout=self.kind.layout,
                whole_only=self.kind.whole_only,
            )
            limits = replace(backend.capacity.current, saving=self.kind.saving)
            backend.capacity = replace(backend.capacity, layouts=(limits,))
            self.longest = limits.cells_per_sequence
            return backend

        return load

    @property
    def opened(self) -> Executor:
        assert self.executor is not None
        return self.executor

    @property
    def backend(self) -> ToyBackend:
        assert isinstance(self.opened.backend, ToyBackend)
        return self.opened.backend

    def teardown(self) -> None:
        if self.executor is not None:
            self.executor.close()

    def _refused(self, pair: Pair, *states: State) -> tuple[type[caravan.CaravanError], ...] | None:
        """Return the errors of a call that needs one of ``states``; None if the call fits."""
        if pair.state in states:
            return None
        return {
            State.ENDED: _ENDED,
            State.PENDING: (caravan.NeedsInfer,),
            State.IDLE: (caravan.NeedsPrompt,),
        }[pair.state]

    @rule(target=pairs)
    def create(self) -> Pair:
        pair = Pair(self.opened.create())
        self.alive.append(pair)
        return pair

    @rule(pair=pairs, prompt=_TOKENS | _TEXTS, all_logits=st.booleans())
    def prompt(self, pair: Pair, prompt: list[int] | str, all_logits: bool) -> None:
        tokens = prompt
        if isinstance(tokens, str):
            tokens = _VOCABULARY.tokenize(tokens, add_special=not pair.tokens, parse_special=True)
        if pair.state in (State.PENDING, State.ENDED):
            error = (caravan.AlreadyPrompted,) if pair.state is State.PENDING else _ENDED
            with pytest.raises(error):
                pair.real.prompt(prompt, all_logits=all_logits)
        elif len(pair.tokens) + len(tokens) > self.longest:
            with pytest.raises(caravan.TooLong):
                pair.real.prompt(prompt, all_logits=all_logits)
        else:
            pair.real.prompt(prompt, all_logits=all_logits)
            pair.tokens += tokens
            pair.state, pair.kept = State.PENDING, len(tokens) if all_logits else 1

    @rule(pair=pairs, all_logits=st.booleans())
    def prompt_nothing(self, pair: Pair, all_logits: bool) -> None:
        if pair.state is State.IDLE and pair.tokens:
            pair.real.prompt([], all_logits=all_logits)
            pair.state, pair.kept = State.PENDING, 1
        else:
            with pytest.raises((caravan.ConversationError, caravan.ClosedError, caravan.RequestError)):
                pair.real.prompt([], all_logits=all_logits)

    @rule()
    def infer(self) -> None:
        waiting = {pair.real for pair in self.alive if pair.state is State.PENDING}
        did = self.opened.infer()
        groups = (did.done, did.waiting, did.starved)
        assert set().union(*groups) == waiting
        assert sum(map(len, groups)) == len(waiting)
        if waiting and not did.done and not did.waiting:
            assert did.starved
            assert not self.kind.unload_idle
        for pair in self.alive:
            if pair.real in did.done:
                pair.state = State.READY

    @rule()
    def infer_and_fail(self) -> None:
        """A step that fails leaves half of its tokens in the cache."""
        self.backend.hook = lambda _batch: DecodeOutcome.FAILED
        try:
            assert not self.opened.infer().done
        except caravan.GenerationError:
            assert any(pair.state is State.PENDING for pair in self.alive)
        self.backend.hook = None

    @rule()
    def infer_all(self) -> None:
        """Make room as a user would, until all is computed."""
        for _ in range(100):
            self.infer()
            if all(pair.state is not State.PENDING for pair in self.alive):
                return
            if not self.kind.unload_idle and not self._progresses():
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
            for call in (pair.real.sample, pair.real.logits):
                with pytest.raises(error):
                    call()
            return
        logits = logits_after(pair.tokens)
        assert pair.real.sample().id == int(logits.argmax())
        assert pair.real.sample(lambda row: int(row.argmin())).id == int(logits.argmin())

    @rule(pair=pairs, count=st.integers(0, 6))
    def generate(self, pair: Pair, count: int) -> None:
        written, appended, ends = list[int](), 0, False
        try:
            for token in pair.real.generate(count):
                assert token.id == int(logits_after(pair.tokens + written).argmax())
                appended = len(written)
                written.append(token.id)
                ends = token.ends
            appended = len(written) - ends
        except caravan.TooLong:
            assert len(pair.tokens) + appended == self.longest
        except caravan.CacheFull:
            appended = len(written)
        except (caravan.NeedsPrompt, *_ENDED):
            assert pair.state in (State.IDLE, State.ENDED)
        if appended:
            pair.tokens, pair.kept = pair.tokens + written[:appended], 1
        for one in self.alive:
            # Its steps are those of all conversations that wait.
            if one.state is State.PENDING or one is pair:
                one.state = one.real.state
                assert one.state is not State.ENDED

    @rule(target=pairs, pair=pairs)
    def fork(self, pair: Pair) -> Pair:
        if pair.state is State.ENDED:
            with pytest.raises(_ENDED):
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
        elif len(new) > self.longest:
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
            assert pair.real.held == 0
            return
        with pytest.raises(_ENDED):
            pair.real.unload()

    @rule(target=pairs, pair=pairs)
    def save_and_load(self, pair: Pair) -> Pair:
        if pair.state is State.ENDED:
            with pytest.raises(_ENDED):
                pair.real.save()
            return pair
        other = Pair(self.opened.load(pair.real.save()), list(pair.tokens), pair.state, pair.kept)
        self.alive.append(other)
        return other

    @rule(fits=st.booleans())
    def save_and_open_all(self, fits: bool) -> None:
        """Where the cells fit, as much is held as before, in no more cells."""
        backend = self.backend
        if not fits:
            backend.contents.state_fingerprint = "another"
        used, held = backend.cache.used, [pair.real.held for pair in self.alive]
        with TemporaryDirectory() as folder:
            path = Path(folder) / "batch"
            self.opened.save(path)
            self.opened.close()
            with patch("caravan.lowlevel.backend_loader", self._loader):
                self.executor = Executor.open(path, backend="fake", unload_idle=self.kind.unload_idle)
        for pair, real in zip(self.alive, self.opened.conversations, strict=True):
            pair.real = real
        if not fits or self.kind.saving is Saving.NOTHING:
            assert not any(pair.real.held for pair in self.alive)
        elif self.kind.saving is Saving.ANY:
            assert [pair.real.held for pair in self.alive] == held
            assert self.backend.cache.used <= used

    @rule(pair=pairs)
    def close(self, pair: Pair) -> None:
        pair.real.close()
        pair.real.close()
        if pair in self.alive:
            self.alive.remove(pair)
        pair.state = State.ENDED

    @precondition(lambda self: self.alive)
    @rule(pair=pairs)
    def refuse_an_id(self, pair: Pair) -> None:
        with pytest.raises((caravan.ConversationError, caravan.ClosedError, caravan.RequestError)):
            pair.real.prompt([VOCABULARY_SIZE])
        with pytest.raises((caravan.ConversationError, caravan.ClosedError, caravan.RequestError)):
            pair.real.modify(lambda tokens: [*tokens, -1])

    @invariant()
    def conversations_are_what_they_must_be(self) -> None:
        assert [pair.real for pair in self.alive] == list(self.opened.conversations)
        for pair in self.alive:
            assert (pair.real.tokens, pair.real.state) == (pair.tokens, pair.state)
            pieces = map(_VOCABULARY.piece, pair.tokens)
            assert pair.real.text == b"".join(one.data for one in pieces if not one.special).decode("utf-8", "replace")
            if pair.state is State.READY:
                for offset in range(pair.kept):
                    expected = logits_after(pair.tokens[: len(pair.tokens) - offset])
                    assert np.array_equal(pair.real.logits(offset), expected)
                with pytest.raises(IndexError):
                    pair.real.logits(pair.kept)

    @invariant()
    def cells_are_those_that_are_held(self) -> None:
        backend, held = self.backend, [pair.real for pair in self.alive if pair.real.sequence_id is not None]
        assert len({one.sequence_id for one in held}) == len(held) <= _SEQUENCES
        assert all(one.held for one in held)
        lengths = {one.sequence_id: one.held for one in held}
        assert [backend.length(number) for number in range(_SEQUENCES)] == [
            lengths.get(number, 0) for number in range(_SEQUENCES)
        ]


TestExecutor = ExecutorMachine.TestCase
TestExecutor.settings = settings(max_examples=examples(200), stateful_step_count=50)
