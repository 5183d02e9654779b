"""Random commands, valid and invalid, against a model of the shard: cells conserve, refusals change nothing."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import (
    Decode,
    FilterBatch,
    Load,
    LoadEntry,
    PrefixCopy,
    Row,
    RowOutputs,
    RunSlice,
    Save,
    SaveEntry,
    SetLayout,
)
from caravan_proto.messages.limits import KvLayout, LayoutLimits, SavedBytes
from caravan_proto.messages.results import Holdings, LayoutSet, Loaded, Saved, StepOutcome
from caravan_shard.backends.base import DecodeOutcome
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.engine.drafts import DraftBudget
from caravan_shard.protocol.results import PromptLogprobs, Refusal, StepResult
from caravan_shard.sequences.run_files import RunFiles
from caravan_shard.sequences.runs import RunStore
from caravan_testing.examples import examples
from caravan_testing.shard_builders import (
    EngineDriver,
    ToyBlockModel,
    ToyDraftModel,
    check_draft_cells,
    first_chunk,
    header,
    next_chunk,
    row,
    run_key,
    with_parameters,
)
from caravan_testing.shard_promises import ADAPTERS, CHOOSING, GREEDY, Choosing, Promise, SavedRun, common_length
from caravan_testing.toy_oracle import expected_logprobs
from caravan_testing.waiting import wait_until

pytestmark = pytest.mark.examples

CELLS = 64
SEQUENCES = 4
# Less than all sequences may need. A cell of the toy model takes 8 bytes.
SAVED_CELLS, DISK_CELLS = 60, 70
UNKNOWN_KEY = bytes(16)
CELL_BYTES = 8
IDS = st.integers(0, SEQUENCES)  # one too many


def run_note(tokens: list[int]) -> bytes:
    """Return the note of the run that ends with these tokens."""
    return bytes(tokens[::-1])


class ShardMachine(RuleBasedStateMachine):
    layout = KvLayout.UNIFIED
    draft_model_type: type[ToyDraftModel] = ToyDraftModel

    def __init__(self) -> None:
        super().__init__()
        self.promises: dict[int, Promise] = {}
        self.runs: dict[bytes, SavedRun] = {}
        self.folder = TemporaryDirectory()
        self.start_shard()

    def start_shard(self) -> None:
        # It has room for some of the sequences.
        self.draft_model = self.draft_model_type(cells=96, max_sequences=SEQUENCES, max_batch_tokens=16, wrong_every=3)
        self.backend = ToyBackend(
            draft_model=self.draft_model,
            cells=CELLS,
            max_sequences=SEQUENCES,
            max_batch_tokens=24,
            max_prompt_logprob_tokens=16,
            layout=self.layout,
            other_layouts=[layout for layout in KvLayout if layout is not self.layout],
            adapters=["one"],
        )
        # A fourth of the memory is for runs that are being written.
        files = RunFiles(Path(self.folder.name), self.backend.contents.state_fingerprint)
        runs = RunStore(SAVED_CELLS * CELL_BYTES * 4 // 3, files, DISK_CELLS * CELL_BYTES)
        self.driver = EngineDriver(self.backend, runs=runs)

    def take(self, answer: StepResult | Refusal | None, due: set[int]) -> bool:
        """Check an answer; True if the step was made."""
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
            self.promises[sequence_id].output.append(token)
        self.take_prompt_logprobs(answer.prompt_logprobs or PromptLogprobs())
        return True

    def take_prompt_logprobs(self, rows: PromptLogprobs) -> None:
        """Collect prompt logprobs, which only sequences that requested them may have."""
        start = 0
        for sequence_id, count in zip(rows.sequence_ids, rows.counts, strict=True):
            collected = self.promises[sequence_id].prompt_logprobs
            assert collected is not None
            collected += rows.logprobs[start : start + count]
            start += count
        assert start == len(rows.logprobs)

    def advancing(self, sequence_ids: list[int]) -> set[int]:
        return {
            key
            for key in sequence_ids
            if key in self.promises and self.promises[key].is_complete and self.promises[key].is_unfinished
        }

    def some_held(self, data: st.DataObject) -> int:
        """Draw a sequence id, mostly of a held sequence."""
        held = st.sampled_from(sorted(self.promises)) if self.promises else IDS
        return data.draw(st.one_of(held, held, held, IDS))

    def some_prefix(self, data: st.DataObject) -> PrefixCopy:
        """Draw a prefix, mostly one that can be copied."""
        source_id = self.some_held(data)
        computed = len(self.promises[source_id].computed) if source_id in self.promises else 1
        return PrefixCopy(
            source_id=source_id, length=data.draw(st.one_of(*[st.integers(1, computed)] * 3, st.integers(0, 30)))
        )

    @rule(
        data=st.data(),
        careful=st.sampled_from([True, True, True, False]),
        takes_over=st.booleans(),
        tokens=st.lists(st.integers(32, 126), min_size=1, max_size=20),
        held_back=st.sampled_from([0, 0, 0, 2, 6]),
        riders=st.lists(IDS, max_size=3),
        max_new=st.integers(1, 12),
        adapter=ADAPTERS,
        choosing=CHOOSING,
        wants_prompt_logprobs=st.sampled_from([False, False, True]),
        max_draft_tokens=st.sampled_from([0, 1, 4, 8]),
        draft_pool=st.sampled_from([b"", b"a", b"b"]),
        corrupted=st.sampled_from([0, 2, 3, 5, None]),
    )
    def start(
        self,
        data: st.DataObject,
        *,
        careful: bool,
        takes_over: bool,
        tokens: list[int],
        held_back: int,
        riders: list[int],
        max_new: int,
        adapter: str,
        choosing: Choosing,
        wants_prompt_logprobs: bool,
        max_draft_tokens: int,
        draft_pool: bytes,
        corrupted: int | None,
    ) -> None:
        copies = takes_over or data.draw(st.booleans())
        copy = self.some_prefix(data) if copies and (self.promises or not careful) else None
        free_ids = [key for key in range(SEQUENCES) if key not in self.promises]
        if takes_over and copy is not None:
            sequence_id = copy.source_id
        else:
            sequence_id = data.draw(st.sampled_from(free_ids) if careful and free_ids else IDS)
        if careful:
            if copy is not None and copy.source_id in self.promises:
                adapter = self.promises[copy.source_id].adapter
            riders = [key for key in set(riders) - {sequence_id} if key in self.promises]
            riders = [key for key in riders if self.promises[key].is_complete and self.promises[key].adapter == adapter]
        start = copy.length if copy is not None else 0
        total = start + len(tokens) + held_back
        chunk = first_chunk(
            sequence_id, tokens, total=total, last=held_back == 0, copy=copy, max_new=max_new, **choosing
        )
        due = self.advancing(riders)
        source = self.promises.get(copy.source_id) if copy is not None else None
        prefix = source.computed[:start] if source is not None else []
        before = self.promises.get(sequence_id)
        promise = self.promises[sequence_id] = Promise([*prefix, *tokens], total, choosing, max_new, adapter)
        predicts = max_draft_tokens > 0 and corrupted is not None
        predicted = promise.predicted(held_back, corrupted or 0) if predicts else ()
        chunk = with_parameters(
            chunk,
            adapter=adapter,
            prompt_logprobs=wants_prompt_logprobs,
            max_draft_tokens=max_draft_tokens,
            prediction=predicted,
            draft_pool=draft_pool,
        )
        # Those of the copied tokens and of the first one behind them are not computed.
        promise.prompt_logprobs = [np.nan] * start if wants_prompt_logprobs else None
        promise.copied = start
        mates = [self.promises[key].adapter for key in riders if key in self.promises]
        answer = self.driver.try_prefill(chunk, riders=riders)
        if source is not None and copy is not None and copy.source_id != sequence_id:
            mates.append(source.adapter)
        elif before is not None and copy is not None:
            mates.append(before.adapter)
        assert isinstance(answer, Refusal) or set(mates) <= {adapter}
        assert isinstance(answer, Refusal) or not wants_prompt_logprobs or len(tokens) <= 16
        if not self.take(answer, due | ({sequence_id} if held_back == 0 else set())):
            del self.promises[sequence_id]
            if before is not None:
                self.promises[sequence_id] = before

    @rule(
        data=st.data(),
        copies=st.sampled_from(["not", "from another", "from itself"]),
        tokens=st.lists(st.integers(32, 126), min_size=1, max_size=20),
        outputs=st.sampled_from(RowOutputs),
        adapter=ADAPTERS,
    )
    def evaluate(self, data: st.DataObject, copies: str, tokens: list[int], outputs: RowOutputs, adapter: str) -> None:
        copy = self.some_prefix(data) if copies != "not" else None
        free_ids = [key for key in range(SEQUENCES) if key not in self.promises]
        sequence_id = data.draw(st.sampled_from(free_ids)) if free_ids and copy is not None else self.some_held(data)
        if copy is not None and copies == "from itself":
            sequence_id = copy.source_id
        source = self.promises.get(copy.source_id if copy is not None else sequence_id)
        if source is not None:
            adapter = data.draw(st.sampled_from([source.adapter] * 4 + [adapter]))
        held = source.computed if source is not None else []
        start = data.draw(st.sampled_from([len(held)] * 4 + [0])) if copy is None else copy.length
        end = start + len(tokens)
        keep = data.draw(st.one_of(st.none(), st.just(0), st.just(start), st.integers(0, end + 1)))
        made = row(sequence_id, tokens, start, copy=copy, adapter=adapter, outputs=outputs, keep_length=keep)
        before = self.promises.get(sequence_id)
        answer = self.driver.try_evaluate(made)
        assert isinstance(answer, Refusal) != self.is_sound_row(made)
        if isinstance(answer, Refusal) or answer.outcome is not StepOutcome.OK:
            return
        self.check_evaluations(made, [*held[:start], *tokens], answer)
        if before is not None and before.is_unfinished and not made.takes_over:
            return
        self.promises.pop(sequence_id, None)
        if made.kept:
            self.promises[sequence_id] = Promise([*held[:start], *tokens], end, GREEDY, 1, adapter)
            self.promises[sequence_id].park(made.kept)

    def is_sound_row(self, made: Row) -> bool:
        source = self.promises.get(made.sequence_id if made.copy is None else made.copy.source_id)
        held = self.promises.get(made.sequence_id)
        if made.sequence_id >= SEQUENCES or made.end > self.limits.cells_per_sequence or not 0 <= made.kept <= made.end:
            return False
        if made.outputs is RowOutputs.ALL and len(made.token_ids) > 16:
            return False
        if source is None:
            return made.copy is None and made.start == 0
        if source.adapter != made.adapter:
            return False
        if made.copy is not None:
            return 1 <= made.copy.length <= len(source.computed) and (made.takes_over or held is None)
        return made.start == len(source.computed) and (not source.is_unfinished or made.kept == made.start)

    def check_evaluations(self, made: Row, tokens: list[int], answer: StepResult) -> None:
        found = answer.evaluations
        assert found is not None
        assert not answer.rows.token_ids
        assert made.outputs is not None
        count = {RowOutputs.NONE: 0, RowOutputs.LAST: 1, RowOutputs.ALL: len(made.token_ids)}[made.outputs]
        assert found.counts == [count] * (count > 0)
        rows = expected_logprobs(tokens, made.adapter)
        pairs = list(zip(rows, tokens[1:], strict=True))[len(tokens) - count :]
        expected = [one[token] for one, token in pairs]
        np.testing.assert_allclose(found.logprobs, [*expected, *[np.nan] * (count > 0)], atol=1e-4)

    @precondition(lambda self: any(not promise.is_complete for promise in self.promises.values()))
    @rule(data=st.data(), offset=st.sampled_from([0, 0, 0, 1]))
    def continue_prompt(self, data: st.DataObject, offset: int) -> None:
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

    @precondition(lambda self: self.promises)
    @rule(
        data=st.data(),
        steps=st.integers(1, 5),
        sloppy=st.sampled_from([False, False, False, True]),
        max_draft_tokens=st.sampled_from([0, 3, 16, 17]),
    )
    def decode(self, data: st.DataObject, steps: int, *, sloppy: bool, max_draft_tokens: int) -> None:
        complete = [key for key, promise in self.promises.items() if promise.is_complete]
        if complete:
            adapter = self.promises[data.draw(st.sampled_from(complete))].adapter
            complete = [key for key in complete if self.promises[key].adapter == adapter]
        sequence_ids = data.draw(st.lists(IDS, max_size=4)) if sloppy or not complete else complete
        command = Decode(sequence_ids=sequence_ids, max_steps=steps, max_draft_tokens=max_draft_tokens)
        refusal = self.driver.engine.begin_decode(command)
        sound = len(set(sequence_ids)) == len(sequence_ids) and all(
            key in self.promises and self.promises[key].is_complete for key in sequence_ids
        )
        sound = sound and len({self.promises[key].adapter for key in sequence_ids}) <= 1
        sound = sound and max_draft_tokens <= self.backend.capacity.max_draft_tokens
        assert (refusal is None) == sound
        while sound and steps > 0:
            budget = DraftBudget(max_draft_tokens, steps - 1)
            before = {key: len(promise.output) for key, promise in self.promises.items()}
            answer = self.driver.engine.decode_step(sequence_ids, 0, budget)
            if not self.take(answer, self.advancing(sequence_ids)):
                break
            steps -= self.check_drafts(answer, budget, before)

    def check_drafts(self, answer: StepResult | Refusal | None, budget: DraftBudget, before: dict[int, int]) -> int:
        """Check the drafts of a step; return the most tokens that a sequence got, at least 1."""
        assert not isinstance(answer, Refusal)
        got = {key: len(promise.output) - before[key] for key, promise in self.promises.items()}
        if answer is None or answer.drafts is None:
            assert max(got.values()) <= 1
            return 1
        drafts = answer.drafts
        assert sum(drafts.drafted) <= budget.total
        for key, drafted, accepted in zip(drafts.sequence_ids, drafts.drafted, drafts.accepted, strict=True):
            assert 0 <= accepted <= drafted <= budget.each
            assert accepted <= got.pop(key) <= accepted + 1
        assert max(got.values(), default=0) <= 1
        return answer.most_tokens

    @precondition(lambda self: self.advancing(list(self.promises)))
    @rule(outcome=st.sampled_from([DecodeOutcome.ABORTED, DecodeOutcome.FAILED, DecodeOutcome.INVALID]))
    def fail(self, outcome: DecodeOutcome) -> None:
        running = sorted(self.advancing(list(self.promises)))
        adapter = self.promises[running[0]].adapter
        running = [key for key in running if self.promises[key].adapter == adapter]
        self.backend.hook = lambda _batch: outcome
        chunk = [first_chunk(key, [70, 71, 72], max_new=5) for key in range(SEQUENCES) if key not in self.promises][:1]
        chunk = [with_parameters(one, adapter=adapter) for one in chunk]
        assert not self.take(self.driver.try_prefill(*chunk, riders=running), set())
        self.backend.hook = None

    @precondition(lambda self: self.promises)
    @rule(data=st.data(), most=st.sampled_from([1, 1, 1, SEQUENCES]))
    def keep(self, data: st.DataObject, most: int) -> None:
        released = data.draw(st.lists(st.sampled_from(sorted(self.promises)), unique=True, max_size=most))
        keep = sorted(self.promises.keys() - set(released))
        assert self.driver.keep(*keep).sequence_ids == keep
        self.promises = {key: self.promises[key] for key in keep}

    @precondition(lambda self: self.promises)
    @rule(data=st.data(), riders=st.lists(IDS, max_size=2, unique=True))
    def park(self, data: st.DataObject, riders: list[int]) -> None:
        prefix = self.some_prefix(data)
        promise = self.promises.get(prefix.source_id)
        due = self.advancing(riders) - {prefix.source_id}
        answer = self.driver.try_prefill(riders=riders, park={prefix.source_id: prefix.length})
        if promise is None or not 1 <= prefix.length <= len(promise.computed):
            assert isinstance(answer, Refusal)
        elif not isinstance(answer, Refusal):
            promise.park(prefix.length)
            self.take(answer, due)

    @precondition(lambda self: self.promises)
    @rule(data=st.data(), outcome=st.sampled_from([DecodeOutcome.ABORTED, DecodeOutcome.FAILED]))
    def fail_to_take_over(self, data: st.DataObject, outcome: DecodeOutcome) -> None:
        sequence_id = data.draw(st.sampled_from(sorted(self.promises)))
        promise = self.promises[sequence_id]
        length = data.draw(st.integers(1, len(promise.computed)))
        self.backend.hook = lambda _batch: outcome
        chunk = first_chunk(sequence_id, [70, 71], max_new=5, copy=PrefixCopy(source_id=sequence_id, length=length))
        chunk = with_parameters(chunk, adapter=promise.adapter)
        answer = self.driver.try_prefill(chunk)
        self.backend.hook = None
        if isinstance(answer, Refusal):
            began = answer.error is ShardError.FORWARD_FAILED
        else:
            began = answer.outcome is StepOutcome.ABORTED
        if began and length < len(promise.computed):
            promise.park(length)

    @property
    def limits(self) -> LayoutLimits:
        return self.backend.capacity.current

    def some_save(self, data: st.DataObject) -> SaveEntry:
        """Draw a run of a sequence, mostly one that can be saved."""
        sequence_id = self.some_held(data)
        held = self.promises.get(sequence_id)
        tokens = held.computed if held is not None else [65]
        sloppy = data.draw(st.sampled_from([False, False, False, True]))
        start = data.draw(st.one_of(st.just(0), st.integers(0, len(tokens) - 1)))
        cuts = st.integers(0, len(tokens) + 1) if sloppy else st.integers(start + 1, len(tokens))
        chosen = sorted(data.draw(st.sets(cuts, min_size=1, max_size=3)))
        adapter = held.adapter if held is not None else ""
        return SaveEntry(
            sequence_id=sequence_id,
            start=start,
            cuts=tuple((cut, run_key(tokens[:cut], adapter)) for cut in chosen),
            release=data.draw(st.booleans()),
            note=run_note(tokens[: chosen[-1]]),
        )

    def is_sound(self, entry: SaveEntry) -> bool:
        held = self.promises.get(entry.sequence_id)
        return held is not None and entry.start < entry.cuts[0][0] and entry.end <= len(held.computed)

    @precondition(lambda self: self.promises)
    @rule(data=st.data(), count=st.integers(1, 2))
    def save(self, data: st.DataObject, count: int) -> None:
        entries = [self.some_save(data) for _ in range(count)]
        answer = self.driver.engine.save(Save(entries=entries), 0)
        released = [entry.sequence_id for entry in entries[:-1] if entry.release]
        if not all(map(self.is_sound, entries)) or entries[-1].sequence_id in released:
            assert isinstance(answer, Refusal)
            return
        assert isinstance(answer, Saved)
        for entry, is_saved, size in zip(entries, answer.saved, answer.sizes_bytes, strict=True):
            run = SavedRun(
                entry.start,
                self.promises[entry.sequence_id].computed[: entry.end],
                self.promises[entry.sequence_id].adapter,
            )
            known = self.runs.get(run.key)
            if known is None and self.cells_in_memory + run.cells <= SAVED_CELLS:
                known = self.runs[run.key] = run
            assert (is_saved, size) == (known is not None, 0 if known is None else CELL_BYTES * known.cells)
            if entry.release:
                del self.promises[entry.sequence_id]

    @property
    def cells_in_memory(self) -> int:
        return sum(run.cells for run in self.runs.values() if not run.on_disk)

    @property
    def cells_on_disk(self) -> int:
        return sum(run.cells for run in self.runs.values() if run.on_disk)

    def some_shared(self, data: st.DataObject, tokens: list[int], adapter: str) -> PrefixCopy | None:
        """Draw a prefix of ``tokens`` that a sequence holds, without the last token; or None."""
        common = {
            key: min(common_length(promise.computed, tokens), len(tokens) - 1)
            for key, promise in self.promises.items()
            if promise.adapter == adapter
        }
        source_id = data.draw(st.sampled_from([None, *(key for key, length in common.items() if length)]))
        if source_id is None:
            return None
        return PrefixCopy(source_id=source_id, length=data.draw(st.integers(1, common[source_id])))

    def some_slices(self, data: st.DataObject, tokens: list[int], adapter: str, at: int) -> list[RunSlice]:
        """Draw slices of any runs that have these tokens from ``at`` on, one after another, as far as there are any."""
        slices: list[RunSlice] = []
        while having := [run for run in self.runs.values() if run.adapter == adapter and run.has(tokens, at)]:
            run = data.draw(st.sampled_from(having))
            until = data.draw(st.integers(at + 1, common_length(run.tokens, tokens)))
            slices.append(RunSlice(key=run.key, start=at, end=until))
            at = until
        return slices

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), free=st.sampled_from([True] * 4 + [False]), right=st.sampled_from([True] * 4 + [False]))
    def load(self, data: st.DataObject, *, free: bool, right: bool) -> None:
        free_ids = [key for key in range(SEQUENCES) if key not in self.promises]
        sequence_id = data.draw(st.sampled_from(free_ids) if free and free_ids else IDS)
        last = data.draw(st.sampled_from(list(self.runs.values())))
        end = data.draw(st.integers(last.start + 1, last.end))
        tokens = last.tokens[:end]
        copy = self.some_shared(data, tokens, last.adapter)
        first = 0 if copy is None else copy.length
        slices = self.some_slices(data, tokens, last.adapter, first)
        covered = slices[-1].end if slices else first
        if covered < end:
            slices.append(RunSlice(key=UNKNOWN_KEY, start=covered, end=end))
        if not right:
            slices.append(RunSlice(key=last.key, start=end, end=last.end + 1))
        entry = LoadEntry(
            sequence_id=sequence_id, token_ids=tokens[first:], slices=slices, adapter=last.adapter, copy=copy
        )
        free_cells = self.driver.engine.free_cells
        if data.draw(st.booleans()):
            self.driver.engine.runs.fetch([one.key for one in slices])
        answer = self.driver.engine.load(Load(entries=[entry]), 0)
        is_split = self.limits.layout is KvLayout.SPLIT
        cannot_share = is_split and copy is not None
        if not right or sequence_id not in free_ids or end > self.limits.cells_per_sequence or cannot_share:
            assert isinstance(answer, Refusal)
            return
        assert isinstance(answer, Loaded)
        fits = is_split or end - first <= free_cells
        assert answer.loaded == [fits and covered == end]
        assert answer.bad_runs == ([] if covered == end else [UNKNOWN_KEY])
        if answer.loaded == [True]:
            self.promises[sequence_id] = Promise(tokens, end, GREEDY, 1, last.adapter)
            self.promises[sequence_id].park(end)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), spills=st.booleans())
    def drop_or_spill(self, data: st.DataObject, *, spills: bool) -> None:
        key = data.draw(st.sampled_from([*self.runs, UNKNOWN_KEY]))
        with_key = header(spill=[key]) if spills else header(drop=[key])
        command = FilterBatch(keep=list(self.promises), header=with_key)
        assert isinstance(self.driver.engine.filter_batch(command), Holdings)
        run = self.runs.get(key)
        if run is not None and spills and (run.on_disk or self.cells_on_disk + run.cells <= DISK_CELLS):
            run.on_disk = True
        else:
            self.runs.pop(key, None)
        wait_until(lambda: not self.driver.engine.runs._leaving, "what leaves has left")

    @rule(layout=st.sampled_from(KvLayout), works=st.sampled_from([True, True, True, False]))
    def set_layout(self, layout: KvLayout, *, works: bool) -> None:
        before = self.limits.layout
        self.backend.layout_works = works
        answer = self.driver.engine.set_layout(SetLayout(layout=layout), 0)
        part = CELLS // SEQUENCES if layout is KvLayout.SPLIT else CELLS
        if any(len(promise.computed) > part for promise in self.promises.values()):
            assert isinstance(answer, Refusal)
            return
        assert isinstance(answer, LayoutSet)
        assert answer.layout == self.limits
        assert answer.layout.layout is (layout if works else before)
        # Only cells that were shared, and are not any more, may be too many.
        assert not answer.lost or (not works and before is KvLayout.UNIFIED)
        for key in answer.lost:
            del self.promises[key]

    @rule()
    def restart(self) -> None:
        self.driver.engine.close()
        self.promises = {}
        self.start_shard()
        listed = {run.key for run, _ in self.driver.engine.runs.list_runs()}
        lost = [run for key, run in self.runs.items() if key not in listed]
        self.runs = {key: run for key, run in self.runs.items() if key in listed}
        assert not any(run.on_disk for run in lost)
        for run in self.runs.values():
            run.on_disk = True
        assert all(self.cells_on_disk + run.cells > DISK_CELLS for run in lost)

    def teardown(self) -> None:
        with self.folder:
            self.driver.engine.close()

    @invariant()
    def saved_runs_conserve(self) -> None:
        store = self.driver.engine.runs
        expected = {key: run.on_disk for key, run in self.runs.items()}
        assert {run.key: on_disk for run, on_disk in store.list_runs()} == expected
        assert all(run.note == run_note(self.runs[run.key].tokens) for run, _ in store.list_runs())
        assert store.used == SavedBytes(memory=CELL_BYTES * self.cells_in_memory, disk=CELL_BYTES * self.cells_on_disk)
        assert self.cells_in_memory <= SAVED_CELLS
        assert self.cells_on_disk <= DISK_CELLS

    @invariant()
    def cells_conserve(self) -> None:
        assert self.driver.engine.free_cells == CELLS - self.backend.cache.used
        assert self.driver.engine.sequence_count == len(self.promises)
        for key, promise in self.promises.items():
            assert self.backend.length(key) == len(promise.computed)
        unfinished = sum(promise.is_unfinished for promise in self.promises.values())
        assert self.driver.engine.unfinished_count == unfinished

    @invariant()
    def the_draft_model_holds_beginnings_of_sequences(self) -> None:
        check_draft_cells(self.driver, self.draft_model)

    @invariant()
    def every_output_is_the_expected_one(self) -> None:
        for promise in self.promises.values():
            if promise.output:
                assert promise.output == promise.expected[: len(promise.output)]

    @invariant()
    def every_requested_prompt_logprob_is_the_expected_one(self) -> None:
        for promise in self.promises.values():
            if promise.prompt_logprobs is not None:
                rows = expected_logprobs(promise.held, promise.adapter)
                expected = [row[token] for row, token in zip(rows, promise.held[1:], strict=True)]
                unknown = promise.copied + 1
                expected = [*[np.nan] * unknown, *expected[unknown - 1 :]]
                np.testing.assert_allclose(promise.prompt_logprobs, expected, atol=1e-4)


class SplitShardMachine(ShardMachine):
    layout = KvLayout.SPLIT


class BlockShardMachine(ShardMachine):
    draft_model_type = ToyBlockModel


TestUnifiedShard, TestSplitShard = ShardMachine.TestCase, SplitShardMachine.TestCase
TestBlockShard = BlockShardMachine.TestCase
TestUnifiedShard.settings = TestSplitShard.settings = settings(max_examples=examples(150), stateful_step_count=30)
TestBlockShard.settings = settings(max_examples=examples(50), stateful_step_count=30)
