"""vLLM's ``prompt_logprobs``: how likely the tokens of a prompt were, and what else was."""

from collections.abc import Sequence

from caravan_router.core.tokens import PromptToken
from caravan_router.http.openai.schema import PromptLogprob
from caravan_router.text.detokenize import display_text
from caravan_router.text.prompt_text import PromptText


def prompt_logprobs_of(
    prompt: PromptText, scores: Sequence[PromptToken], top: int
) -> list[dict[str, PromptLogprob] | None]:
    """One entry a token: the ``top`` likeliest at its place and the one that is there; None for the first."""
    columns = zip(prompt.tokenized.token_ids, prompt.tokenized.pieces, scores, strict=True)
    return [_entry(token_id, piece, score, top) for token_id, piece, score in columns]


def _entry(token_id: int, piece: bytes, score: PromptToken, top: int) -> dict[str, PromptLogprob] | None:
    if score.logprob is None:
        return None
    entry = {
        str(other.token_id): PromptLogprob(other.logprob, rank, display_text(other.piece))
        for rank, other in enumerate(score.alternatives[:top], 1)
    }
    entry.setdefault(str(token_id), PromptLogprob(score.logprob, None, display_text(piece)))
    return entry
