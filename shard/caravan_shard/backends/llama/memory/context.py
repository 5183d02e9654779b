"""Makes llama.cpp's contexts, and finds what fits into them and what of a sequence can be shared and saved."""

from dataclasses import dataclass
from typing import Any

import llama_cpp

from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_shard.backends.llama.memory.memory import LlamaMemory
from caravan_shard.backends.llama.memory.places import Places
from caravan_shard.backends.llama.memory.recurrent import RecurrentMemory, RollbackMemory
from caravan_shard.backends.llama.memory.window import SplitWindowedMemory, WindowedMemory, ids_needed
from caravan_shard.config import CELL_BLOCK, ShardConfig
from caravan_shard.model_flags import MAX_SEQUENCES, RopeFlags
from caravan_shard.startup_error import StartupError

_SCALINGS: dict[str, int] = {
    "model": llama_cpp.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    "none": llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE,
    "linear": llama_cpp.LLAMA_ROPE_SCALING_TYPE_LINEAR,
    "yarn": llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN,
}
# What llama.cpp takes for "as the file says".
_OF_THE_FILE = -1.0


_GRIDS = frozenset({llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE})

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


def position_dimensions(model: Any) -> int:
    """Return how many dimensions the position of an embedding has in a llama_model: 4 with M-RoPE."""
    return 4 if llama_cpp.llama_model_rope_type(model) in _GRIDS else 1


def reads_tokens_only(model: Any, architecture: str) -> bool:
    """Whether llama.cpp would end the process when a llama_model reads embeddings, such as those of an image."""
    return architecture == "granite-switch" or (architecture in ("glm4", "glm4moe") and position_dimensions(model) == 1)


def set_rope(flags: RopeFlags, parameters: Any) -> None:
    """Set the fields of a ``llama_context_params``."""
    parameters.rope_scaling_type = _SCALINGS[flags.rope_scaling]
    parameters.rope_freq_base = flags.rope_freq_base or 0.0
    parameters.rope_freq_scale = flags.frequency_scale or 0.0
    parameters.yarn_orig_ctx = flags.yarn_orig_ctx or 0
    for field in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast"):
        value = getattr(flags, field)
        setattr(parameters, field, _OF_THE_FILE if value is None else value)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenContext:
    """A context with its memory, and what fits into it."""

    context: Any
    memory: LlamaMemory
    limits: LayoutLimits


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
    def _loses_cells(self) -> bool:
        # Without guards, only the whole of a sequence is sure to have all cells of its window.
        return self.window > 0 and self.layout is KvLayout.UNIFIED and not self.has_guards

    @property
    def whole_only(self) -> bool:
        return self.stateful or self._loses_cells

    @property
    def saving(self) -> Saving:
        if self._loses_cells:
            return Saving.NOTHING
        return Saving.WITH_STATE if self.stateful else Saving.ANY


class Contexts:
    """Makes contexts over one model, in each layout that the flags allow."""

    def __init__(self, model: Any, config: ShardConfig, trained_context: int) -> None:
        """Find out what fits; raises StartupError."""
        self._model = model
        self._config = config
        # Whether llama.cpp finds the candidates of rows in the contexts where it can.
        self.take_candidates = False
        self._longest_context = config.longest_context(trained_context)
        # How many tokens of a sequence can be taken back, where some layers are recurrent. Found in the first context.
        self._rollback_tokens = 0
        self._stateful = bool(llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model))
        self._cells = cells = config.cells_of(trained_context)
        layouts = config.layouts(cells)
        if layouts == [KvLayout.SPLIT] and cells < config.parallel * CELL_BLOCK:
            raise StartupError(
                f"{'exact' if config.exact else 'kv-layout split'} needs {CELL_BLOCK} cells for each of "
                f"{config.parallel} sequences and the model was trained with {cells}: pass "
                f"-c {config.parallel * CELL_BLOCK}, or {'drop --exact' if config.exact else '--kv-layout unified'}"
            )
        if len(layouts) > 1 and self._stateful:
            # Recurrent state takes no cells, and the state of a hybrid model cannot move between the layouts.
            layouts = [KvLayout.UNIFIED]
        if KvLayout.SPLIT in layouts:
            # llama.cpp rounds the cells of each sequence up. Both layouts have as many, so that sequences can move.
            self._cells = -(-(cells // config.parallel) // CELL_BLOCK) * CELL_BLOCK * config.parallel
        self._traits = {layout: self._find_traits(layout) for layout in layouts}
        self.batch_tokens = min(config.batch_size, self._cells)
        if any(traits.has_guards for traits in self._traits.values()):
            self.batch_tokens = max(min(config.ubatch_size, self.batch_tokens), config.parallel)
        vocabulary_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
        fitting = _PROMPT_LOGITS_BYTES // (4 * vocabulary_size)
        self.prompt_logprob_tokens = min(self.batch_tokens, max(_LEAST_PROMPT_LOGPROB_TOKENS, fitting))

    @property
    def layouts(self) -> tuple[KvLayout, ...]:
        """The possible layouts, beginning with the one to start with."""
        return tuple(self._traits)

    def limits(self, layout: KvLayout) -> LayoutLimits:
        """Return what fits in a layout."""
        cells = self._cells
        per_sequence = cells if layout is KvLayout.UNIFIED else cells // self._config.parallel
        traits = self._traits[layout]
        return LayoutLimits(
            layout=layout,
            cells=cells,
            cells_per_sequence=min(per_sequence, self._longest_context or per_sequence),
            whole_only=traits.whole_only,
            rollback_tokens=self._rollback_tokens,
            saving=traits.saving,
        )

    def open(self, layout: KvLayout) -> OpenContext | None:
        """Make a context; None if llama.cpp cannot. Raises StartupError if the model is of a kind that has no cells.

        llama.cpp may make more cells than it was asked for. From then on, `limits` reports what it made.
        """
        context = llama_cpp.llama_init_from_model(self._model, self.parameters(layout))
        if not context:
            return None
        if not llama_cpp.llama_get_memory(context):
            llama_cpp.llama_free(context)
            raise StartupError("llama.cpp has no KV cache for this architecture, so it cannot generate texts")
        self._cells = int(llama_cpp.llama_n_ctx(context))
        self._rollback_tokens = int(llama_cpp.llama_n_rs_seq(context))
        return OpenContext(
            context=context,
            memory=self._memory(context, layout),
            limits=self.limits(layout),
        )

    def cannot_open(self) -> StartupError:
        """Return the error of a shard that cannot start without a context."""
        return StartupError(
            f"llama.cpp cannot make a context of {self._cells} cells: pass a smaller -c, other -ctk/-ctv, or -fa on "
            "for quantized values; see --log-level debug"
        )

    def _find_traits(self, layout: KvLayout) -> _Traits:
        unified = layout is KvLayout.UNIFIED
        parallel = self._config.parallel
        window = int(llama_cpp.llama_model_n_swa(self._model))
        if self._stateful or window >= (self._cells if unified else self._cells // parallel):
            window = 0
        return _Traits(
            layout=layout,
            stateful=self._stateful,
            window=window,
            has_guards=window > 0 and unified and ids_needed(parallel) <= MAX_SEQUENCES,
        )

    def parameters(self, layout: KvLayout) -> Any:
        """Return the ``llama_context_params`` of a context in ``layout``."""
        config, traits = self._config, self._traits[layout]
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = self._cells
        parameters.n_batch = self.batch_tokens
        parameters.n_ubatch = min(config.ubatch_size, self.batch_tokens)
        parameters.n_seq_max = config.parallel
        if traits.has_guards:
            parameters.n_seq_max = ids_needed(config.parallel)
            parameters.n_ubatch = self.batch_tokens
        # A step has one output per sequence, and those of prompt logprobs. llama.cpp reserves memory for n_outputs_max,
        # and requires at least one for each sequence id.
        parameters.n_outputs_max = parameters.n_seq_max + self.prompt_logprob_tokens
        parameters.n_threads = config.decode_threads
        parameters.n_threads_batch = config.batch_threads
        parameters.flash_attn_type = FLASH_ATTENTION[config.flash_attn]
        parameters.type_k = _CACHE_TYPES[config.cache_type_k]
        parameters.type_v = _CACHE_TYPES[config.cache_type_v]
        parameters.kv_unified = layout is KvLayout.UNIFIED
        if traits.stateful:
            # llama.cpp computes what can be taken back in one ubatch, and ends the process if that has no room for it.
            parameters.n_rs_seq = max(0, min(config.rollback_tokens, parameters.n_ubatch - 2))
        parameters.offload_kqv = True
        parameters.no_perf = True
        # In a cache of the window's size, a sequence could not be cut back to a prefix, nor share one.
        parameters.swa_full = True
        set_rope(config, parameters)
        return parameters

    def _memory(self, context: Any, layout: KvLayout) -> LlamaMemory:
        traits, parallel = self._traits[layout], self._config.parallel
        places = Places(has_grids=position_dimensions(self._model) > 1)
        # llama.cpp does so whenever it is told to leave flash attention.
        transposes = self._config.flash_attn == "off"
        if traits.has_guards:
            return WindowedMemory(context, sequences=parallel, window=traits.window, transposes=transposes)
        unified = layout is KvLayout.UNIFIED
        if traits.stateful:
            kind = RollbackMemory if self._rollback_tokens else RecurrentMemory
            return kind(context, sequences=parallel, shares_cells=unified, transposes=transposes, places=places)
        if unified:
            return LlamaMemory(context, copies_whole=False, streams=1, transposes=transposes, places=places)
        if traits.window > 0:
            return SplitWindowedMemory(context, copies_whole=True, streams=parallel, transposes=transposes)
        return LlamaMemory(context, copies_whole=True, streams=parallel, transposes=transposes, places=places)
