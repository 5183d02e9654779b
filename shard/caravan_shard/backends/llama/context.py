"""Makes llama.cpp's context, and tells what fits and what of a sequence can be shared and saved."""

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


# Logits of prompt tokens that are told of have their place in llama.cpp's buffers whether any are asked for or not.
_TOLD_LOGITS_BYTES = 64 << 20
_LEAST_TOLD_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenContext:
    """A context, and all that was decided with it."""

    context: Any
    capacity: Capacity
    memory: LlamaMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class _Traits:
    """What decides which prefixes there are. ``window`` is in tokens; 0 if every layer sees every cell."""

    layout: KvLayout
    stateful: bool
    window: int
    has_twins: bool

    @property
    def sharing(self) -> PrefixSharing:
        # Without twins, only all that a sequence holds is sure to have its window.
        loses_cells = self.window > 0 and self.layout is KvLayout.UNIFIED and not self.has_twins
        return PrefixSharing.WHOLE_ONLY if self.stateful or loses_cells else PrefixSharing.ANY

    @property
    def saving(self) -> Saving:
        if self.sharing is PrefixSharing.WHOLE_ONLY:
            return Saving.WHOLE_ONLY
        if self.layout is KvLayout.UNIFIED:
            return Saving.SUFFIXES
        # A state leaves out what is outside the window: it could go on, but not be shared.
        return Saving.NOTHING if self.window > 0 else Saving.WHOLE_ONLY


def open_context(model: Any, config: ShardConfig, trained_context: int) -> OpenContext:
    """A context over ``model``; raises StartupError."""
    cells = config.ctx_size or trained_context
    if config.layout is KvLayout.SPLIT and cells < config.parallel * CELL_BLOCK:
        raise StartupError(
            f"kv-layout split needs {CELL_BLOCK} cells for each of {config.parallel} sequences and the model was "
            f"trained with {cells}: pass -c {config.parallel * CELL_BLOCK} or --kv-layout unified"
        )
    traits = _traits(model, config, cells)
    parameters = _parameters(config, cells, traits)
    told_tokens = _told_tokens(model, parameters.n_batch)
    # One output per sequence and pass besides; llama.cpp reserves memory for as many as it is told, and wants one for
    # each id.
    parameters.n_outputs_max = parameters.n_seq_max + told_tokens
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise StartupError(
            f"llama.cpp cannot make a context of {cells} cells: pass a smaller -c, other -ctk/-ctv, or -fa on "
            "for quantized values; see --log-level debug"
        )
    return OpenContext(
        context=context,
        capacity=_capacity(context, config, traits, trained_context, told_tokens),
        memory=_memory(context, config, traits),
    )


def _told_tokens(model: Any, batch_tokens: int) -> int:
    """How many prompt tokens a pass may tell of."""
    vocabulary_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
    return min(batch_tokens, max(_LEAST_TOLD_TOKENS, _TOLD_LOGITS_BYTES // (4 * vocabulary_size)))


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
        has_twins=window > 0 and unified and ids_needed(config.parallel) <= MAX_SEQUENCES,
    )


def _parameters(config: ShardConfig, cells: int, traits: _Traits) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = cells
    parameters.n_batch = config.batch_size
    parameters.n_ubatch = min(config.ubatch_size, config.batch_size)
    parameters.n_seq_max = config.parallel
    if traits.has_twins:
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
    # In a cache of the window's size, a prefix could not be cut back to or shared.
    parameters.swa_full = True
    return parameters


def _capacity(context: Any, config: ShardConfig, traits: _Traits, trained_context: int, told_tokens: int) -> Capacity:
    per_sequence = int(llama_cpp.llama_n_ctx_seq(context))
    return Capacity(
        cells=int(llama_cpp.llama_n_ctx(context)),
        cells_per_sequence=min(per_sequence, trained_context) if trained_context > 0 else per_sequence,
        max_sequences=config.parallel,
        max_batch_tokens=int(llama_cpp.llama_n_batch(context)),
        layout=config.layout,
        sharing=traits.sharing,
        saving=traits.saving,
        max_prompt_logprob_tokens=told_tokens,
    )


def _memory(context: Any, config: ShardConfig, traits: _Traits) -> LlamaMemory:
    if traits.has_twins:
        return WindowedMemory(context, sequences=config.parallel, window=traits.window)
    return LlamaMemory(context, copies_whole=config.layout is KvLayout.SPLIT or traits.stateful)
