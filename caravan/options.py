"""The options of a model and of a server over it: the flags of ``caravan serve`` that mean something in one process."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypedDict


class ModelOptions(TypedDict, total=False):
    """Options of a model. Names, values and defaults are those of the flags, see docs/configuration.md.

    Two defaults differ: ``target_itl_ms=1000`` of an `LLM`, and ``kv_layout="unified"`` of an `Executor`.

    ``parallel``: most sequences held at a time. ``ctx_size``: KV cells of all sequences together, 0 for the context
    that the model was trained with. ``embeddings``: make `LLM.embed` and `LLM.score` possible. ``speculate``: most
    draft tokens of a sequence in one step; ``model_draft`` and ``spec_type`` are of no use without, and
    ``rollback_tokens`` are as many, 8 at most, unless they are given. ``lora``: adapters, each [NAME=]PATH[:SCALE].
    ``max_loras``: most adapters of `LLM.load_adapter` at a time. ``lora_dir``: the folder from which clients of
    `LLM.serve` may load them.
    """

    model_draft: str
    gpu_layers_draft: int
    spec_type: str
    parallel: int
    ctx_size: int
    rollback_tokens: int
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
    fit: bool
    fit_target: str
    fit_ctx: int
    allow_overcommit: bool
    cpu_moe: bool
    n_cpu_moe: int
    override_tensor: Sequence[str]
    mmap: bool
    mlock: bool
    numa: str
    mmproj: str
    mmproj_auto: bool
    image_min_tokens: int
    image_max_tokens: int
    enable_prompt_embeds: bool
    media_threads: int
    media_cache: int
    rope_scaling: str
    rope_scale: float
    rope_freq_base: float
    rope_freq_scale: float
    yarn_orig_ctx: int
    yarn_ext_factor: float
    yarn_attn_factor: float
    yarn_beta_slow: float
    yarn_beta_fast: float
    flash_attn: str
    exact: bool
    cache_type_k: str
    cache_type_v: str
    cache_ram: int
    cache_dir: str
    cache_dir_space: float
    embeddings: bool
    pooling: str
    lora: Sequence[str]
    lora_dir: str
    max_loras: int
    sampling_threads: int
    max_tokenize_bytes: int
    temp: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    max_tokens: int
    fit_host: int
    backend: str
    fake_step_ms: float
    speculate: int
    prefix_caching: bool
    prefill_mode: str
    target_itl_ms: float
    max_batch_prefill_tokens: int


class ExecutorOptions(ModelOptions, total=False):
    """Options of an `Executor`. ``unload_idle``: let idle conversations give way to those that wait."""

    unload_idle: bool


class ServerOptions(TypedDict, total=False):
    """Options of a server over a model. Names, values and defaults are those of the flags, see docs/configuration.md.

    ``port``: 0 for any free one. ``graceful_termination_timeout``: seconds for running requests to end when the server
    is stopped.
    """

    hostname: str
    port: int
    max_concurrent_requests: int
    max_client_batch_size: int
    max_prompt_bytes: int
    max_best_of: int
    max_stop_sequences: int
    strict_fields: bool
    max_top_n_tokens: int
    max_input_tokens: int
    max_total_tokens: int
    payload_limit: int
    max_bodies_mb: int
    max_media: int
    max_request_new_tokens: int
    max_connections: int
    header_timeout_s: float
    body_timeout_s: float
    slow_client_timeout_s: float
    api_keys_file: str
    api_key: str
    root_path: str
    metrics_port: int
    metrics_key: str
    ssl_certfile: str
    ssl_keyfile: str
    ssl_ca_certs: str
    cors_allow_origin: Sequence[str]
    state_file: str
    state_space: int
    state_life_s: float
    usage_file: str
    audit_log: str
    graceful_termination_timeout: float


# Options of the engine over the model; all others are the model's own.
ENGINE_OPTIONS = frozenset({"speculate", "prefix_caching", "prefill_mode", "target_itl_ms", "max_batch_prefill_tokens"})
# What an executor has no use for.
SERVED_OPTIONS = ENGINE_OPTIONS | {"lora_dir", "max_loras"}


# What other packages call an option.
_FOREIGN = {
    "n_ctx": "ctx_size",
    "num_ctx": "ctx_size",
    "max_model_len": "ctx_size",
    "n_gpu_layers": "gpu_layers",
    "n_threads": "threads",
    "n_threads_batch": "threads_batch",
    "n_batch": "batch_size",
    "n_ubatch": "ubatch_size",
    "max_num_batched_tokens": "batch_size",
    "max_num_seqs": "parallel",
    "n_parallel": "parallel",
    "enable_prefix_caching": "prefix_caching",
    "speculative_config": "speculate",
    "draft_model": "model_draft",
    "kv_cache_dtype": "cache_type_k",
    "type_k": "cache_type_k",
    "type_v": "cache_type_v",
    "swap_space": "cache_ram",
    "gpu_memory_utilization": "fit_target",
    "use_mmap": "mmap",
    "use_mlock": "mlock",
    "lora_path": "lora",
    "max_cpu_loras": "max_loras",
    "host": "hostname",
    "max_new_tokens": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "guided_decoding": "structured_outputs",
}


def split_options(model: str | Path, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the model, with its file, and those of the engine. Raises TypeError for an unknown one."""
    if not isinstance(model, str | Path):
        raise TypeError(f"model must be a path or a name. Given: {model!r:.80}")
    check_names(options, ModelOptions.__annotations__)
    of_model = {name: value for name, value in options.items() if name not in ENGINE_OPTIONS}
    of_engine = {name: value for name, value in options.items() if name in ENGINE_OPTIONS}
    return {"model": str(model)} | of_model, of_engine


def check_names(options: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError if an option is none of the ``known`` ones; it names the nearest."""
    unknown = sorted(set(options).difference(known))
    if unknown:
        # Imported here: only errors need it.
        from caravan_proto.command_line import nearest

        def shown(name: str) -> str:
            foreign = _FOREIGN.get(name, "")
            meant = foreign if foreign in known else nearest(name, known)
            return f"{name} (did you mean {meant}?)" if meant else name

        raise TypeError(f"unknown options: {', '.join(map(shown, unknown))}")


class NamedFields:
    """The base of a dataclass that answers an unknown field as `check_names` does."""

    __slots__ = ()

    def __new__(cls, *_values: Any, **fields: Any) -> Self:
        """Raises TypeError."""
        check_names(fields, cls.__annotations__)
        return super().__new__(cls)


MAX_CANDIDATES = 256
MAX_STOPS = 64
