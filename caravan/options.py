"""The options of a model: the flags of ``caravan serve`` that mean something in one process."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict


class ModelOptions(TypedDict, total=False):
    """Options of a model. Names, values and defaults are those of the flags, see docs/configuration.md.

    Two defaults differ: ``target_itl_ms=1000`` of an `LLM`, and ``kv_layout="unified"`` of an `Executor`.

    ``parallel``: most sequences held at a time. ``ctx_size``: KV cells of all sequences together, 0 for the context
    that the model was trained with. ``embeddings``: make `LLM.embed` and `LLM.score` possible. ``speculate``: most
    draft tokens of a sequence in one step; ``model_draft`` is of no use without. ``lora``: adapters, each
    [NAME=]PATH[:SCALE].
    """

    model_draft: str
    gpu_layers_draft: int
    parallel: int
    ctx_size: int
    kv_layout: str
    batch_size: int
    ubatch_size: int
    threads: int
    threads_batch: int
    spin_count: int
    gpu_layers: int
    device: str
    rpc: str
    split_mode: str
    tensor_split: str
    main_gpu: int
    flash_attn: str
    cache_type_k: str
    cache_type_v: str
    cache_ram: int
    cache_dir: str
    cache_dir_space: float
    embeddings: bool
    pooling: str
    lora: Sequence[str]
    sampling_threads: int
    max_tokenize_bytes: int
    backend: str
    fake_step_ms: float
    speculate: int
    prefix_caching: bool
    prefill_mode: str
    target_itl_ms: float
    max_batch_prefill_tokens: int


# Options of the engine over the model; all others are the model's own.
ENGINE_OPTIONS = frozenset({"speculate", "prefix_caching", "prefill_mode", "target_itl_ms", "max_batch_prefill_tokens"})


def split_options(model: str | Path, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the model, with its file, and those of the engine. Raises TypeError for an unknown one."""
    unknown = sorted(options.keys() - ModelOptions.__annotations__.keys())
    if unknown:
        raise TypeError(f"unknown options: {', '.join(unknown)}")
    of_model = {name: value for name, value in options.items() if name not in ENGINE_OPTIONS}
    of_engine = {name: value for name, value in options.items() if name in ENGINE_OPTIONS}
    return {"model": str(model)} | of_model, of_engine
