"""Checks token ids, and the texts of an Embed request before the first of them is computed."""

from collections.abc import Collection, Sequence

from caravan_proto.errors import ShardError
from caravan_shard.backends.base import Capacity
from caravan_shard.protocol.results import Refusal, bad_request

# Texts in one request; bounds the size of its reply.
MAX_TEXTS = 256


def check_ids(name: str, token_ids: Collection[int], vocabulary_size: int) -> Refusal | None:
    """Check that the model has all tokens. ``name``: what the refusal calls them."""
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocabulary_size:
        return None
    wrong = min(token_ids) if min(token_ids) < 0 else max(token_ids)
    return bad_request(f"{name} must be < {vocabulary_size}. Given: {wrong}")


def split_texts(
    token_ids: Sequence[int], counts: Sequence[int], capacity: Capacity, vocabulary_size: int
) -> list[list[int]] | Refusal:
    """Cut ``token_ids`` into texts of ``counts`` tokens."""
    if not (capacity.embedding_size or capacity.ranks):
        return bad_request("vectors are not served here: start the shard with --embeddings")
    if len(counts) > MAX_TEXTS:
        return bad_request(f"there must be <= {MAX_TEXTS} texts. Given: {len(counts)}")
    if sum(counts) != len(token_ids):
        return bad_request(f"the counts must add up to the {len(token_ids)} tokens. Given: {sum(counts)}")
    if (refusal := check_ids("token ids", token_ids, vocabulary_size)) is not None:
        return refusal
    texts = []
    start = 0
    for place, count in enumerate(counts):
        if count == 0:
            return bad_request(f"text {place} is empty")
        if count > capacity.max_embed_tokens:
            return Refusal(
                ShardError.SEQUENCE_TOO_LONG,
                f"a text must have <= {capacity.max_embed_tokens} tokens. Given: {count} in text {place}",
            )
        texts.append(list(token_ids[start : start + count]))
        start += count
    return texts
