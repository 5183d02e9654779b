"""Makes llama.cpp's context, and finds what fits into it and what of a sequence can be shared and saved."""

from dataclasses import dataclass
from typing import Any

import llama_cpp

from caravan_shard.backends.base import Capacity, PrefixSharing, Saving, StartupError
from caravan_shard.backends.llama.memory import LlamaMemory
from caravan_shard.backends.llama.window import WindowedMemory, ids_needed
from caravan_shard.config import CELL_BLOCK, MAX_SEQUENCES, ShardConfig
from caravan_shard.kv_layout import KvLayout

FLASH_ATTENTION = {"auto": -1, "off": 0, "on": 1}
# enum ggml_type; the bindings name only some of them.
_CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}


# llama.cpp reserves this room for the logits of prompt tokens, whether prompt logprobs are requested or not.
_PROMPT_LOGITS_BYTES = 64 << 20
_LEAST_PROMPT_LOGPROB_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenContext:
    """A context with its capacity and its memory."""

    context: Any
    capacity: Capacity
    memory: LlamaMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """The traits that decide what can be shared and saved.

    ``stateful``: some layers are recurrent. ``window``: the sliding window in tokens; 0 if every layer sees every cell.
    ``has_guards``: see `WindowedMemory`.
    """

    layout: KvLayout
    stateful: bool
    window: int
    has_guards: bool

    @property
    def sharing(self) -> PrefixSharing:
        # Without guards, only the whole of a sequence is sure to have all cells of its window.
        loses_cells = self.window > 0 and self.layout is KvLayout.UNIFIED and not self.has_guards
        return PrefixSharing.WHOLE_ONLY if self.stateful or loses_cells else PrefixSharing.ANY

    @property
    def saving(self) -> Saving:
        if self.sharing is PrefixSharing.WHOLE_ONLY:
            return Saving.WHOLE_ONLY
        if self.layout is KvLayout.UNIFIED:
            return Saving.SUFFIXES
        # A state leaves out the cells outside the window: the sequence could grow, but not be shared.
        return Saving.NOTHING if self.window > 0 else Saving.WHOLE_ONLY


def open_context(model: Any, config: ShardConfig, trained_context: int) -> OpenContext:
    """Make a context over ``model``; raises StartupError."""
    cells = config.ctx_size or trained_context
    if config.layout is KvLayout.SPLIT and cells < config.parallel * CELL_BLOCK:
        raise StartupError(
            f"kv-layout split needs {CELL_BLOCK} cells for each of {config.parallel} sequences and the model was "
            f"trained with {cells}: pass -c {config.parallel * CELL_BLOCK} or --kv-layout unified"
        )
    traits = _traits(model, config, cells)
    parameters = _parameters(config, cells, traits)
    prompt_logprob_tokens = _max_prompt_logprob_tokens(model, parameters.n_batch)
    # A step has one output per sequence, and those of prompt logprobs. llama.cpp reserves memory for n_outputs_max, and
    # requires at least one for each sequence id.
    parameters.n_outputs_max = parameters.n_seq_max + prompt_logprob_tokens
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise StartupError(
            f"llama.cpp cannot make a context of {cells} cells: pass a smaller -c, other -ctk/-ctv, or -fa on "
            "for quantized values; see --log-level debug"
        )
    return OpenContext(
        context=context,
        capacity=_capacity(context, config, traits, trained_context, prompt_logprob_tokens),
        memory=_memory(context, config, traits),
    )


def _max_prompt_logprob_tokens(model: Any, batch_tokens: int) -> int:
    """Return how many prompt tokens of a step may have log probabilities."""
    vocabulary_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
    return min(batch_tokens, max(_LEAST_PROMPT_LOGPROB_TOKENS, _PROMPT_LOGITS_BYTES // (4 * vocabulary_size)))


def _traits(model: Any, config: ShardConfig, cells: int) -> _Traits:
    unified = config.layout is KvLayout.UNIFIED
    stateful = bool(llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model))
    window = int(llama_cpp.llama_model_n_swa(model))
    if stateful or window >= (cells if unified else cells // config.parallel):
        window = 0
    return _Traits(
        layout=config.layout,
        stateful=stateful,
        window=window,
        has_guards=window > 0 and unified and ids_needed(config.parallel) <= MAX_SEQUENCES,
    )


def _parameters(config: ShardConfig, cells: int, traits: _Traits) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = cells
    parameters.n_batch = config.batch_size
    parameters.n_ubatch = min(config.ubatch_size, config.batch_size)
    parameters.n_seq_max = config.parallel
    if traits.has_guards:
        parameters.n_seq_max = ids_needed(config.parallel)
        parameters.n_batch = parameters.n_ubatch = max(parameters.n_ubatch, config.parallel)
    parameters.n_threads = config.decode_threads
    parameters.n_threads_batch = config.batch_threads
    parameters.flash_attn_type = FLASH_ATTENTION[config.flash_attn]
    parameters.type_k = _CACHE_TYPES[config.cache_type_k]
    parameters.type_v = _CACHE_TYPES[config.cache_type_v]
    parameters.kv_unified = config.layout is KvLayout.UNIFIED
    parameters.offload_kqv = True
    parameters.no_perf = True
    # In a cache of the window's size, a sequence could not be cut back to a prefix, nor share one.
    parameters.swa_full = True
    return parameters


def _capacity(
    context: Any, config: ShardConfig, traits: _Traits, trained_context: int, prompt_logprob_tokens: int
) -> Capacity:
    per_sequence = int(llama_cpp.llama_n_ctx_seq(context))
    return Capacity(
        cells=int(llama_cpp.llama_n_ctx(context)),
        cells_per_sequence=min(per_sequence, trained_context) if trained_context > 0 else per_sequence,
        max_sequences=config.parallel,
        max_batch_tokens=int(llama_cpp.llama_n_batch(context)),
        layout=config.layout,
        sharing=traits.sharing,
        saving=traits.saving,
        max_prompt_logprob_tokens=prompt_logprob_tokens,
    )


def _memory(context: Any, config: ShardConfig, traits: _Traits) -> LlamaMemory:
    if traits.has_guards:
        return WindowedMemory(context, sequences=config.parallel, window=traits.window)
    return LlamaMemory(context, copies_whole=config.layout is KvLayout.SPLIT or traits.stateful)
