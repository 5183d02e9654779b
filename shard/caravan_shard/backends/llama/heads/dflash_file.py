"""Finds out whether a DFlash or DSpark head fits its model, before either is loaded, and how it drafts."""

from caravan_shard.backends.base import DraftBlock
from caravan_shard.backends.llama.heads.file_pair import FilePair

# Of DSpark: what a token adds to the logits of the next one.
_MARKOV = "markov_w1.weight"
_NEEDED = ("fc.weight", "enc.output_norm.weight", "output_norm.weight")
_OF_LAYERS = (
    *("attn_norm", "attn_q", "attn_k", "attn_output", "attn_q_norm", "attn_k_norm"),
    *("ffn_norm", "ffn_gate", "ffn_up", "ffn_down"),
)
_UNKNOWN = "tokenizer.ggml.mask_token_id"
# What llama.cpp has where a DFlash file names none, and the most that is used here.
_USUAL_ROWS, _MOST_ROWS = 16, 64
# llama.cpp ends the process where a graph has more nodes than it has room for: these, or so many for each tensor.
_MOST_NODES, _NODES_OF_TENSOR = 1024, 8
# At most, those of the layers for each tensor, and those of DSpark for each row.
_USED_OF_TENSOR, _USED_OF_ROW = 6, 25


def is_dspark(files: FilePair) -> bool:
    """Whether each token of a draft depends on the one before, too."""
    return _MARKOV in files.head.tensors


def block_of(files: FilePair) -> DraftBlock:
    """Return how a head that can be used drafts."""
    predicts_next = is_dspark(files) and files.head.metadata.get(files.key("sample_from_anchor"), True)
    return DraftBlock(
        rows=files.number("block_size") or _USUAL_ROWS,
        unknown=files.head.number(_UNKNOWN) or 0,
        first=0 if predicts_next else 1,
    )


def is_causal(files: FilePair) -> bool:
    """Whether the rows of a block see those before them only."""
    return bool(files.head.metadata.get(files.key("attention.causal"), False))


def why_not_dflash(files: FilePair) -> str | None:
    """Return why the head cannot be used; None if it can. Raises StartupError if the file cannot be read."""
    return _other_kind(files) or files.lacking(_NEEDED) or _other_layers(files) or _other_block(files)


def _other_kind(files: FilePair) -> str | None:
    if "selector_hidden.weight" in files.head.tensors:
        return "heads of DFlash 2, which choose among candidates (selector_hidden.weight), cannot be used yet"
    if files.number("hyper_connection.count"):
        return "heads with layers of DeepSeek V4 (hyper_connection.count) cannot be used yet"
    return None


def _other_layers(files: FilePair) -> str | None:
    own, of_model, layers = files.number("embedding_length") or 0, files.model_size, files.number("block_count") or 0
    if not layers:
        return "it has no layers"
    if own != of_model:
        return f"it reads hidden states of {own} numbers, and those of the model have {of_model}"
    needed = [f"blk.{layer}.{name}.weight" for layer in range(layers) for name in _OF_LAYERS]
    return files.lacking(needed) or files.other_layers() or files.other_keys(own) or files.other_tokens()


def _other_block(files: FilePair) -> str | None:
    rows, unknown = files.number("block_size"), files.head.number(_UNKNOWN)
    if rows is None and not is_dspark(files):
        rows = _USUAL_ROWS
    if rows is None or not 1 < rows <= _MOST_ROWS:
        return f"its blocks ({files.key('block_size')}) must have 2 to {_MOST_ROWS} tokens. Given: {rows}"
    if unknown is None or not 0 <= unknown < files.tokens:
        return f"it names no token for unknown ones ({_UNKNOWN}). Given: {unknown}"
    tensors = len(files.head.tensors)
    if is_dspark(files) and _USED_OF_TENSOR * tensors + _USED_OF_ROW * rows > max(
        _MOST_NODES, _NODES_OF_TENSOR * tensors
    ):
        return f"its blocks of {rows} tokens may need larger graphs than llama.cpp makes for {tensors} tensors"
    return None
