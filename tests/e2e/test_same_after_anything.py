"""Random conversations on real models: each answer is the one that is computed from the start, whatever happened."""

from pathlib import Path

import pytest

from caravan_testing.history_runs import Counts, had
from caravan_testing.shard_models import FAMILIES, fetched

pytestmark = [pytest.mark.e2e, pytest.mark.model]

KINDS = {"next turn", "fork", "rewind", "edit", "move", "preemption", "lost shard"}


def check(counts: Counts) -> None:
    assert counts.same == counts.answers
    assert counts.answers.keys() >= KINDS
    assert counts.metrics["caravan_shard_losses_total"] > 0
    assert counts.cached_tokens > 0


@pytest.mark.slow
def test_hybrid_conversations_with_drafts(tmp_path: Path) -> None:
    """The positions of this hybrid model have several dimensions, and llama.cpp takes wrong drafts back."""
    check(had(fetched(FAMILIES["qwen35"]), tmp_path, answers=32, flags=("--speculate", "4")))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_many_answers(family: str, tmp_path: Path) -> None:
    counts = had(fetched(FAMILIES[family]), tmp_path, answers=60)
    check(counts)
    assert counts.answers["restart"] > 0
    assert counts.metrics["caravan_request_preemptions_total"] > 0
