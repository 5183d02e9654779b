"""Tells how many draft tokens a reply had, in its usage."""

from collections.abc import Sequence

import msgspec

from caravan_router.core.speculation import DraftSource
from caravan_router.http.generation.run import Run
from caravan_router.http.openai.schema import CompletionTokensDetails, DraftTokens


def draft_details(runs: Sequence[Run]) -> CompletionTokensDetails | msgspec.UnsetType:
    """Return the sums over ``runs``; unset if there were no draft tokens."""
    sources: dict[str, DraftTokens] = {}
    for count in (count for run in runs for count in run.drafts):
        before = sources.get(count.source.value, DraftTokens(0, 0))
        sources[count.source.value] = DraftTokens(before.drafted + count.drafted, before.accepted + count.accepted)
    if not sources:
        return msgspec.UNSET
    predicted = sources.get(DraftSource.PREDICTION.value, DraftTokens(0, 0))
    return CompletionTokensDetails(predicted.accepted, predicted.drafted - predicted.accepted, sources)
