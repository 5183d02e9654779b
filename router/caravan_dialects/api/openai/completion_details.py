"""Counts the draft tokens and the thoughts of a reply, for its usage."""

from collections.abc import Sequence

import msgspec

from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.openai.schema import CompletionTokensDetails, DraftTokens
from caravan_proto.messages.results import DraftSource


def completion_details(
    runs: Sequence[Run], thought_tokens: int | None = None
) -> CompletionTokensDetails | msgspec.UnsetType:
    """Return the sums over ``runs``; unset if there were no draft tokens and ``thought_tokens`` is None."""
    sources: dict[str, DraftTokens] = {}
    for count in (count for run in runs for count in run.drafts):
        before = sources.get(count.source.value, DraftTokens(0, 0))
        sources[count.source.value] = DraftTokens(before.drafted + count.drafted, before.accepted + count.accepted)
    if not sources and thought_tokens is None:
        return msgspec.UNSET
    predicted = sources.get(DraftSource.PREDICTION.value, DraftTokens(0, 0))
    thoughts = msgspec.UNSET if thought_tokens is None else thought_tokens
    return CompletionTokensDetails(predicted.accepted, predicted.drafted - predicted.accepted, sources, thoughts)
