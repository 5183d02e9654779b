"""Random commands, sound and unsound, against a model of the shard: cells conserve, refusals change nothing."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from caravan_proto.errors import ShardError
from caravan_shard.backends.base import DecodeOutcome, KvLayout, Prefix
from caravan_shard.backends.fake import FakeBackend, expected_output
from caravan_shard.commands import Decode
from caravan_shard.parameters import SamplingParameters
from caravan_shard.results import Refusal, StepOutcome, StepResult
from caravan_testing.shard_builders import EngineDriver, first_chunk, next_chunk

CELLS = 96
SEQUENCES = 4
IDS = st.integers(0, SEQUENCES)  # one too many
SAMPLING = st.sampled_from(
    [SamplingParameters(), SamplingParameters(temperature=1.0, top_k=20, repetition_penalty=1.3, seed=9)]
)


class Promise:
    """What a sequence was told and what it must answer."""

    def __init__(self, prompt: list[int], total: int, sampling: SamplingParameters, max_new: int) -> None:
        self.held = prompt
        self.total = total
        self.sampling = sampling
        self.max_new = max_new
        self.said: list[int] = []

    @property
    def is_complete(self) -> bool:
        return len(self.held) == self.total

    @property
    def expected(self) -> list[int]:
        return expected_output(self.held, self.max_new, sampling=self.sampling)


class ShardMachine(RuleBasedStateMachine):
    layout = KvLayout.UNIFIED

    def __init__(self) -> None:
        super().__init__()
        self.backend = FakeBackend(cells=CELLS, max_sequences=SEQUENCES, max_batch_tokens=24, layout=self.layout)
        self.driver = EngineDriver(self.backend)
        self.promises: dict[int, Promise] = {}

    def take(self, answer: StepResult | Refusal | None, due: set[int]) -> bool:
        """Check an answer; True if the pass was made."""
        if answer is None:
            assert not due
            return True
        if isinstance(answer, Refusal):
            assert answer.error is not ShardError.FORWARD_FAILED or self.backend.hook is not None
            return False
        if answer.outcome is not StepOutcome.OK:
            assert not answer.rows.token_ids
            return False
        assert set(answer.rows.sequence_ids) == due
        for sequence_id, token in zip(answer.rows.sequence_ids, answer.rows.token_ids, strict=True):
            self.promises[sequence_id].said.append(token)
        return True

    def advancing(self, sequence_ids: list[int]) -> set[int]:
        return {
            key
            for key in sequence_ids
            if key in self.promises
            and self.promises[key].is_complete
            and self.promises[key].said != self.promises[key].expected
        }

    @rule(
        sequence_id=IDS,
        tokens=st.lists(st.integers(32, 126), min_size=1, max_size=20),
        held_back=st.integers(0, 6),
        source_id=st.none() | IDS,
        length=st.integers(1, 30),
        riders=st.lists(IDS, max_size=3),
        max_new=st.integers(1, 12),
        sampling=SAMPLING,
    )
    def start(
        self,
        sequence_id: int,
        tokens: list[int],
        held_back: int,
        source_id: int | None,
        length: int,
        riders: list[int],
        max_new: int,
        sampling: SamplingParameters,
    ) -> None:
        copy = Prefix(source_id=source_id, length=length) if source_id is not None else None
        start = length if copy is not None else 0
        total = start + len(tokens) + held_back
        chunk = first_chunk(
            sequence_id, tokens, total=total, last=held_back == 0, copy=copy, max_new=max_new, sampling=sampling
        )
        due = self.advancing(riders)
        source = self.promises.get(source_id) if source_id is not None else None
        prefix = (source.held + source.said)[:length] if source is not None else []
        before = self.promises.get(sequence_id)
        promise = Promise([*prefix, *tokens], total, sampling, max_new)
        self.promises[sequence_id] = promise
        if not self.take(
            self.driver.try_prefill(chunk, riders=riders), due | ({sequence_id} if held_back == 0 else set())
        ):
            del self.promises[sequence_id]
            if before is not None:
                self.promises[sequence_id] = before

    @precondition(lambda self: any(not promise.is_complete for promise in self.promises.values()))
    @rule(data=st.data(), offset=st.sampled_from([0, 0, 0, 1]))
    def go_on(self, data: st.DataObject, offset: int) -> None:
        sequence_id = data.draw(st.sampled_from([key for key, p in self.promises.items() if not p.is_complete]))
        promise = self.promises[sequence_id]
        count = data.draw(st.integers(1, promise.total - len(promise.held)))
        tokens = [65] * count
        last = len(promise.held) + count == promise.total
        answer = self.driver.try_prefill(next_chunk(sequence_id, len(promise.held) + offset, tokens, last=last))
        held = promise.held
        promise.held = [*held, *tokens]
        if not self.take(answer, {sequence_id} if last else set()):
            promise.held = held

    @rule(sequence_ids=st.lists(IDS, min_size=1, max_size=4), steps=st.integers(1, 5))
    def decode(self, sequence_ids: list[int], steps: int) -> None:
        refusal = self.driver.engine.begin_decode(Decode(sequence_ids=sequence_ids, max_steps=steps))
        sound = len(set(sequence_ids)) == len(sequence_ids) and all(
            key in self.promises and self.promises[key].is_complete for key in sequence_ids
        )
        assert (refusal is None) == sound
        for _ in range(steps if sound else 0):
            if not self.take(self.driver.engine.decode_step(sequence_ids, 0), self.advancing(sequence_ids)):
                break

    @rule(outcome=st.sampled_from([DecodeOutcome.ABORTED, DecodeOutcome.FAILED, DecodeOutcome.INVALID]))
    def fail(self, outcome: DecodeOutcome) -> None:
        running = sorted(self.advancing(list(self.promises)))
        self.backend.hook = lambda _batch: outcome
        chunk = [first_chunk(key, [70, 71, 72], max_new=5) for key in range(SEQUENCES) if key not in self.promises][:1]
        if running or chunk:
            assert not self.take(self.driver.try_prefill(*chunk, riders=running), set())
        self.backend.hook = None

    @rule(keep=st.lists(st.integers(0, SEQUENCES - 1), unique=True))
    def keep(self, keep: list[int]) -> None:
        keep = [key for key in keep if key in self.promises]
        assert self.driver.keep(*keep).sequence_ids == sorted(keep)
        self.promises = {key: self.promises[key] for key in keep}

    @invariant()
    def cells_conserve(self) -> None:
        assert self.driver.engine.free_cells == CELLS - self.backend.cache.used
        assert self.driver.engine.sequence_count == len(self.promises)
        for key, promise in self.promises.items():
            # The last token said is not computed yet.
            assert self.backend.length(key) == len(promise.held) + max(0, len(promise.said) - 1)

    @invariant()
    def everyone_says_what_was_promised(self) -> None:
        for promise in self.promises.values():
            if promise.said:
                assert promise.said == promise.expected[: len(promise.said)]


class SplitShardMachine(ShardMachine):
    layout = KvLayout.SPLIT


MACHINE_SETTINGS = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestUnifiedShard = ShardMachine.TestCase
TestUnifiedShard.settings = MACHINE_SETTINGS
TestSplitShard = SplitShardMachine.TestCase
TestSplitShard.settings = MACHINE_SETTINGS
