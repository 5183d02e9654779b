"""Candidates that llama.cpp finds give the tokens that all logits give, whatever happens to the sequences."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.llama.sampling.candidates import PATIENCE, DeviceCandidates
from caravan_shard.sampling.joint_draw import LEFT
from caravan_shard.sampling.top_candidates import StepCandidates, TopCandidates, draw_from
from caravan_testing.shard_builders import first_chunk, with_parameters
from caravan_testing.shard_models import DEMO_MODEL, ModelDriver, fetched
from caravan_testing.shard_tiny_llama import write_tiny_llama

pytestmark = pytest.mark.model

SEQUENCES = 8
CHAINS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.2, "top_k": 12},
    {"temperature": 0.7, "top_k": 60, "min_p": 0.1},
]
# They need all logits.
OTHERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 40, "repetition_penalty": 1.2},
    {"logprobs": True},
]


class Counted(ModelDriver):
    """Counts the rows that had candidates, and how many lacked them because of doubtful ones.

    Where a row's highest logits include equal ones, the step is computed again with all logits, and the ids wait again
    for their chains. Which rows are doubtful depends on how the host rounds.
    """

    def __init__(self, model: Path, **flags: Any) -> None:
        common = {"parallel": SEQUENCES, "ctx_size": SEQUENCES * 512, "batch_size": 512, "flash_attn": "on"}
        super().__init__(model, **{**common, **flags})
        self.rows = 0
        # The most that can be missing in ``rows``.
        self.missing = 0
        candidates, logits = self.backend.candidates, self.backend.logits
        with_candidates = 0

        def count(rows: int) -> StepCandidates | None:
            nonlocal with_candidates
            found: StepCandidates | None = candidates(rows)
            with_candidates = 0 if found is None else sum(row is not None for row in found.rows)
            self.rows += with_candidates
            return found

        def count_missing(rows: int) -> Any:
            nonlocal with_candidates
            self.missing += PATIENCE * with_candidates
            with_candidates = 0
            return logits(rows)

        self.backend.candidates = count
        self.backend.logits = count_missing


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(params=list(KvLayout), ids=lambda layout: layout.value)
def pair(request: pytest.FixtureRequest, tiny: Path) -> Iterator[tuple[Counted, Counted]]:
    """Two shards, the first with candidates."""
    flags = {"kv_layout": request.param.value}
    drivers = Counted(tiny, backend_sampling="on", **flags), Counted(tiny, **flags)
    assert drivers[0].backend.gives_candidates
    assert not drivers[1].backend.gives_candidates
    yield drivers
    for driver in drivers:
        driver.engine.close()


def start(driver: ModelDriver, sequence_id: int, chain: dict[str, Any], max_new: int, seed: int = 1) -> None:
    """Prefill a short prompt."""
    sampling = SamplingParams(seed=100 * seed + sequence_id, **chain)
    tokens = driver.tokens(f"text {sequence_id} of {seed}")
    driver.prefill(first_chunk(sequence_id, tokens, max_new=max_new, ignore_eos=True, sampling=sampling))


def generate(driver: ModelDriver, chains: list[dict[str, Any]], max_new: int, seed: int = 1) -> dict[int, list[int]]:
    """Return the outputs of as many sequences as fit."""
    driver.engine.release_all()
    for sequence_id in range(SEQUENCES):
        start(driver, sequence_id, chains[sequence_id % len(chains)], max_new, seed)
    driver.decode(range(SEQUENCES))
    return dict(driver.output)


@pytest.mark.parametrize("seeds", [(1,), pytest.param((2, 3, 4), marks=pytest.mark.slow)], ids=["few", "many"])
def test_thousands_of_tokens_are_equal(pair: tuple[Counted, Counted], seeds: tuple[int, ...]) -> None:
    total = 0
    for seed in seeds:
        outputs = [generate(driver, CHAINS, 430, seed) for driver in pair]
        assert outputs[0] == outputs[1]
        total += sum(map(len, outputs[0].values()))
    assert total >= 3_000 * len(seeds)
    assert pair[0].rows > 0.95 * total - pair[0].missing
    assert pair[1].rows == 0


def test_sequences_that_need_all_logits_run_beside_others(pair: tuple[Counted, Counted]) -> None:
    outputs = [generate(driver, [*CHAINS, *OTHERS], 100) for driver in pair]
    assert outputs[0] == outputs[1]
    # Five of the eight can use candidates.
    assert 400 - pair[0].missing < pair[0].rows < 500


def test_an_id_loses_its_chain_at_once_and_gets_it_back_later(pair: tuple[Counted, Counted]) -> None:
    outputs = []
    for driver in pair:
        for seed, chains in enumerate([CHAINS[:1], OTHERS[:1], CHAINS[2:3], OTHERS[2:], CHAINS[1:2]]):
            outputs.append(generate(driver, chains, 30, seed))
    assert outputs[:5] == outputs[5:]
    # A chain is kept where a smaller one would do, and the third and the fifth wait again.
    most = SEQUENCES * 3 * (30 - PATIENCE)
    assert most - pair[0].missing <= pair[0].rows <= most


def test_doubtful_rows_are_drawn_from_all_logits(
    pair: tuple[Counted, Counted], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = generate(pair[1], CHAINS, 60)
    draw = draw_from
    steps = iter(range(1_000_000))

    def doubting(*arguments: Any) -> list[int]:
        return [LEFT if next(steps) % 50 == 0 else token for token in draw(*arguments)]

    monkeypatch.setattr("caravan_shard.engine.token_rows.draw_from", doubting)
    assert generate(pair[0], CHAINS, 60) == expected
    # Whatever is doubtful, the first step after the wait has them.
    assert pair[0].rows >= SEQUENCES


def test_forks_and_drafts(pair: tuple[Counted, Counted]) -> None:
    outputs = []
    for driver in pair:
        start(driver, 0, CHAINS[0], 60)
        driver.decode([0], steps=30)
        known = [*driver.tokens("text 0 of 1"), *driver.output[0]]
        # A fork, and then a sequence with drafts.
        length = len(known) - 2
        fork = first_chunk(
            1, known[length:], ignore_eos=True, max_new=60, copy=PrefixCopy(source_id=0, length=length),
            sampling=SamplingParams(seed=3, **CHAINS[1]),
        )  # fmt: skip
        driver.prefill(fork)
        driver.decode([0, 1], steps=20)
        driver.prefill(with_parameters(first_chunk(2, known * 2, max_new=60, ignore_eos=True), max_draft_tokens=4))
        driver.decode([0, 1, 2], max_draft_tokens=4)
        outputs.append(driver.output)
    assert outputs[0] == outputs[1]
    assert pair[0].rows > 30 - pair[0].missing


def test_another_layout(tiny: Path) -> None:
    flags = {"kv_layout": "auto"}
    outputs = []
    for driver in (Counted(tiny, backend_sampling="on", **flags), Counted(tiny, **flags)):
        layouts = [limits.layout for limits in driver.backend.capacity.layouts]
        for layout in [*layouts, *layouts]:
            driver.engine.release_all()
            driver.set_layout(layout)
            rows = driver.rows
            outputs.append(generate(driver, CHAINS, 30))
            assert (driver.rows > rows) == driver.backend.gives_candidates
        driver.engine.close()
    assert outputs[: len(outputs) // 2] == outputs[len(outputs) // 2 :]


def test_candidates_that_give_other_tokens_are_refused(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    of_row = DeviceCandidates.of_row

    def wrong(self: DeviceCandidates, row: int) -> TopCandidates | None:
        found = of_row(self, row)
        return None if found is None else found._replace(ids=np.roll(found.ids, 1))

    monkeypatch.setattr(DeviceCandidates, "of_row", wrong)
    with caplog.at_level(logging.WARNING):
        driver = Counted(tiny, backend_sampling="on")
    assert not driver.backend.gives_candidates
    assert "gave other tokens" in caplog.text
    driver.engine.close()


def test_nothing_is_probed_without_a_gpu(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceCandidates, "__init__", None)
    driver = Counted(tiny, backend_sampling="auto")
    assert not driver.backend.gives_candidates
    driver.engine.close()


@pytest.mark.slow
def test_tokens_of_the_demo_model_are_equal() -> None:
    outputs = []
    for choice in ("on", "off"):
        driver = Counted(fetched(DEMO_MODEL), backend_sampling=choice)
        outputs.append(generate(driver, CHAINS, 40))
        expected = SEQUENCES * (40 - PATIENCE) if choice == "on" else 0
        assert expected - driver.missing <= driver.rows <= expected
        driver.engine.close()
    assert outputs[0] == outputs[1]
