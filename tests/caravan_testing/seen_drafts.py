"""Notes what a model or a head drafts."""

from collections.abc import Sequence

import pytest

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
