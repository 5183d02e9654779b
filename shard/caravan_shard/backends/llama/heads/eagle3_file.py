"""Finds out whether an EAGLE-3 head fits its model, before either is loaded."""

from caravan_shard.backends.llama.heads.file_pair import FilePair

_LAYERS = 3
_NEEDED = (
    "fc.weight",
    "output_norm.weight",
    *(f"blk.0.{name}.weight" for name in ("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output")),
    *(f"blk.0.{name}.weight" for name in ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")),
)


def why_not_eagle3(files: FilePair) -> str | None:
    """Return why the head cannot be used; None if it can. Raises StartupError if the file cannot be read."""
    reason = files.lacking(_NEEDED)
    if reason:
        return reason
    layers = files.number("block_count")
    if layers != 1:
        return f"it must have 1 layer. Given: {layers}"
    return files.other_layers(_LAYERS) or _other_sizes(files) or files.other_tokens()


def _other_sizes(files: FilePair) -> str | None:
    of_model, read = files.model_size, files.number("target_hidden_size")
    if read != of_model:
        return f"it reads hidden states of {read} numbers, and those of the model have {of_model}"
    own, borrowed = files.number("embedding_length") or 0, files.borrowed()
    if borrowed and own != of_model:
        return f"it lacks {borrowed[0]}, and that of the model has {of_model} numbers for each token, not {own}"
    return files.other_keys(own)
