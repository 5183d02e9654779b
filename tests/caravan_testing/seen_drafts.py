"""Notes what a model or a head drafts."""

from collections.abc import Sequence

import pytest

from caravan_proto.messages.results import DraftSource
from caravan_shard.protocol.results import StepResult
from caravan_shard.speculation.model_drafter import DraftInput, ModelDrafter


def watch_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Return a list that gets each sequence's tokens, and its draft after these."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = ModelDrafter.propose

    def noted(self: ModelDrafter, asked: Sequence[DraftInput], counts: Sequence[int]) -> list[list[int]]:
        found = propose(self, asked, counts)
        seen.extend((list(one.tokens), draft) for one, draft in zip(asked, found, strict=True))
        return found

    monkeypatch.setattr(ModelDrafter, "propose", noted)
    return seen


def counts(results: Sequence[StepResult]) -> tuple[int, int]:
    """Return how many tokens a model or a head drafted, and how many of these were accepted."""
    rows = [
        (drafted, accepted)
        for result in results
        if result.drafts is not None
        for source, drafted, accepted in zip(
            result.drafts.sources, result.drafts.drafted, result.drafts.accepted, strict=True
        )
        if source is DraftSource.MODEL
    ]
    return sum(drafted for drafted, _ in rows), sum(accepted for _, accepted in rows)
