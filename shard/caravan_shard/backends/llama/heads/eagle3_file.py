"""Finds out whether a draft model is an EAGLE-3 head that fits its model, before either is loaded.

Where a file lacks something, or has it in another shape, llama.cpp would end the process at the first draft, if not
before.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np

from caravan_models.cached_model import parts_of
from caravan_models.errors import FetchError
from caravan_models.gguf_header import ARCHITECTURE, GgufHeader, read_architecture, read_header
from caravan_shard.backends.base import StartupError
from caravan_shard.backends.llama.heads.states import can_get_inputs
from caravan_shard.config import ShardConfig

_Read = TypeVar("_Read")

_EAGLE3 = "eagle3"
# Architectures of models whose graphs hand out what each layer reads: where one does not, llama.cpp ends the process.
_ARCHITECTURES = frozenset({"gpt-oss", "llama", "qwen3", "qwen3moe", "qwen35", "qwen35moe"})
_LAYERS = 3
# enum ggml_type: whole numbers of 64 bits.
_I64 = 27
_EMBEDDINGS, _OUTPUT, _TOKENS_OF_HEAD = "token_embd.weight", "output.weight", "d2t"
_NEEDED = (
    "fc.weight",
    "output_norm.weight",
    *(f"blk.0.{name}.weight" for name in ("attn_norm", "attn_norm_2", "attn_q", "attn_k", "attn_v", "attn_output")),
    *(f"blk.0.{name}.weight" for name in ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")),
)


def eagle3_layers(config: ShardConfig) -> tuple[int, ...]:
    """Return the layers of the model that its draft model reads; empty if that is no EAGLE-3 head.

    Raises StartupError if it must be one and is not, or is one that cannot be used. llama.cpp must be initialized.
    """
    if not config.model_draft:
        return ()
    model, draft = Path(config.model), Path(config.model_draft)
    architecture = _read(read_architecture, draft)
    if architecture != _EAGLE3:
        if config.spec_type == "draft-eagle3":
            raise StartupError(
                f"{draft.name} is no EAGLE-3 head, as --spec-type draft-eagle3 asks: its architecture is {architecture}"
            )
        return ()
    if config.spec_type == "none":
        raise StartupError(f"{draft.name} is an EAGLE-3 head: pass --spec-type draft-eagle3")
    head = _read(read_header, draft)
    reason = _why_not(draft, head, _read(read_header, parts_of(model)[0]))
    if reason:
        raise StartupError(f"{draft.name} cannot draft for {model.name}: {reason}")
    return head.lists[_of_head("target_layers")]


def _read(read: Callable[[Path], _Read], path: Path) -> _Read:
    try:
        return read(path)
    except (OSError, FetchError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error


def _of_head(key: str) -> str:
    return f"{_EAGLE3}.{key}"


def _why_not(path: Path, head: GgufHeader, model: GgufHeader) -> str | None:
    """Return why the head in the file ``path`` cannot be used; None if it can."""
    architecture = model.text(ARCHITECTURE)
    if architecture not in _ARCHITECTURES:
        return f"no hidden states can be read from the architecture {architecture} yet"
    if not can_get_inputs():
        return "this build of llama.cpp does not hand out what layers read"
    missing = [name for name in _NEEDED if name not in head.tensors]
    if missing:
        return f"it lacks the tensor {missing[0]}"
    return (
        _other_layers(head, model, architecture)
        or _other_sizes(head, model, architecture)
        or _other_tokens(path, head, model)
    )


def _other_layers(head: GgufHeader, model: GgufHeader, architecture: str) -> str | None:
    own = head.number(_of_head("block_count"))
    if own != 1:
        return f"it must have 1 layer. Given: {own}"
    read = head.lists.get(_of_head("target_layers"), ())
    of_model = model.number(f"{architecture}.block_count") or 0
    of_model -= model.number(f"{architecture}.nextn_predict_layers") or 0
    if len(read) != _LAYERS or not all(0 <= layer < of_model for layer in read):
        return f"it must read {_LAYERS} of the model's layers 0 to {of_model - 1}. Given: {', '.join(map(str, read))}"
    return None


def _other_sizes(head: GgufHeader, model: GgufHeader, architecture: str) -> str | None:
    of_model = model.number(f"{architecture}.embedding_length") or 0
    read = head.number(_of_head("target_hidden_size"))
    if read != of_model:
        return f"it reads hidden states of {read} numbers, and those of the model have {of_model}"
    own = head.number(_of_head("embedding_length")) or 0
    borrowed = [name for name in (_EMBEDDINGS, _OUTPUT) if name not in head.tensors]
    if borrowed and own != of_model:
        return f"it lacks {borrowed[0]}, and that of the model has {of_model} numbers for each token, not {own}"
    heads = head.number(_of_head("attention.head_count")) or 1
    key, value = (head.number(_of_head(f"attention.{name}_length")) or own // heads for name in ("key", "value"))
    if key != value:
        return f"its keys have {key} numbers, and its values {value}"
    return None


def _other_tokens(path: Path, head: GgufHeader, model: GgufHeader) -> str | None:
    tokens, of_model = (one.list_lengths.get("tokenizer.ggml.tokens", 0) for one in (head, model))
    if tokens != of_model:
        return f"it has another vocabulary, of {tokens} tokens instead of {of_model}"
    embedded = head.tensors.get(_EMBEDDINGS)
    if embedded is not None and embedded.lengths[-1] != tokens:
        return f"it has embeddings of {embedded.lengths[-1]} of {tokens} tokens"
    chosen = head.tensors.get(_TOKENS_OF_HEAD)
    if chosen is None:
        return None
    if _OUTPUT not in head.tensors:
        return "it has its own tokens, and no output layer for them"
    if chosen.kind != _I64 or len(chosen.lengths) != 1:
        return f"its tokens ({_TOKENS_OF_HEAD}) are no list of 64-bit numbers"
    try:
        # No more than there may be: the file may claim anything.
        numbers = np.fromfile(path, "<i8", min(chosen.lengths[0], tokens + 1), offset=chosen.start)
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if len(numbers) != chosen.lengths[0] or not all(0 <= number < tokens for number in (numbers.min(), numbers.max())):
        return f"its tokens ({_TOKENS_OF_HEAD}) are not all of the {tokens} ones of the model"
    return None
