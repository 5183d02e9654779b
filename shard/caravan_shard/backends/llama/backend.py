"""The backend over llama.cpp: one model, one context (and a second one for embeddings), one thread."""

import ctypes
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import llama_cpp
import numpy as np

from caravan_shard.arrays import Floats, State
from caravan_shard.backends.base import (
    Capacity,
    CellSlice,
    DecodeOutcome,
    Prefix,
    RunSaving,
    StartupError,
    TokenBatch,
)
from caravan_shard.backends.llama.adapters import LlamaAdapters
from caravan_shard.backends.llama.attention import is_worth_leaving, step_seconds
from caravan_shard.backends.llama.batch import LlamaBatch
from caravan_shard.backends.llama.calls import split_calls
from caravan_shard.backends.llama.context import Contexts, OpenContext
from caravan_shard.backends.llama.devices import ModelPlacement, find_devices, first_devices
from caravan_shard.backends.llama.embedder import LlamaEmbedder
from caravan_shard.backends.llama.filter import LlamaFilter
from caravan_shard.backends.llama.invariance import BatchInvariance
from caravan_shard.backends.llama.log import route_llama_log
from caravan_shard.backends.llama.model import check_gguf_file, fingerprint, load_model, model_facts
from caravan_shard.backends.llama.vocabulary import LlamaVocabulary
from caravan_shard.config import ShardConfig
from caravan_shard.kv_layout import KvLayout

_log = logging.getLogger(__name__)


def _outcome(code: int) -> DecodeOutcome:
    match code:
        case 0:
            return DecodeOutcome.OK
        case 1:
            return DecodeOutcome.NO_KV
        case 2:
            return DecodeOutcome.ABORTED
        case -1:
            return DecodeOutcome.INVALID
        case _:
            return DecodeOutcome.FAILED


class LlamaCppBackend:
    """A Backend. The thread that makes it must also use it: OpenMP keeps a thread pool per calling thread."""

    def __init__(self, config: ShardConfig, *, drafts: bool = False) -> None:
        """Load and warm up; raises StartupError. ``drafts``: it is a draft model."""
        path = Path(config.model)
        check_gguf_file(path, "model", "-m")
        for adapter in config.adapters:
            check_gguf_file(adapter.path, "adapter", "--lora")
        if config.model_draft:
            check_gguf_file(Path(config.model_draft), "draft model", "-md")
        started = monotonic()
        _log.info("loading %s", path.name, extra={"mib": path.stat().st_size >> 20})
        route_llama_log()
        self._model = load_model(path, ModelPlacement(config, first_devices(config.rpc_servers)))
        self._context: Any = None
        self._embedder: LlamaEmbedder | None = None
        self.draft_model: LlamaCppBackend | None = None
        try:
            self._set_up(config, path, is_draft_model=drafts)
        except BaseException:
            self.close()
            raise
        limits = self.capacity.current
        _log.info(
            "model ready",
            extra={
                "seconds": round(monotonic() - started, 1),
                "cells": limits.cells,
                "cells_per_sequence": limits.cells_per_sequence,
                "layout": limits.layout.value,
                "threads": config.decode_threads,
                "threads_batch": config.batch_threads,
            },
        )

    def _set_up(self, config: ShardConfig, path: Path, *, is_draft_model: bool) -> None:
        """Make the context, measure what depends on the host, and load the draft model. Raises StartupError."""
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.vocabulary = LlamaVocabulary(vocab, llama_cpp.llama_model_chat_template(self._model, b"rerank") or b"")
        self._adapters = LlamaAdapters(self._model, config.adapters)
        facts = model_facts(path, self._model, vocab, self.vocabulary, uses_gpus=config.uses_gpus)
        self.facts = replace(facts, adapters=self._adapters.names)
        self.candidate_filter = LlamaFilter(self.vocabulary.size)
        self._contexts = Contexts(self._model, config, self.facts.trained_context)
        opened = self._contexts.open(self._contexts.layouts[0])
        if opened is None:
            raise self._contexts.cannot_open()
        self._embedder = LlamaEmbedder(self._model, config, self.facts) if config.embeddings else None
        self.capacity = Capacity(
            layouts=tuple(self._contexts.limits(layout) for layout in self._contexts.layouts),
            max_sequences=config.parallel,
            max_batch_tokens=self._contexts.batch_tokens,
            max_prompt_logprob_tokens=self._contexts.prompt_logprob_tokens,
            embedding_size=self._embedder.size if self._embedder is not None else 0,
            max_embed_tokens=self._embedder.max_tokens if self._embedder is not None else 0,
            ranks=self._embedder is not None and self._embedder.ranks,
        )
        self._batch = LlamaBatch(self.capacity.max_batch_tokens)
        self._use(opened)
        self._warm_up()
        self._find_state_format()
        if self._contexts.may_leave_flash_attention(opened.limits.layout):
            self._choose_attention(opened.limits.layout)
        self.state_fingerprint = self._fingerprint(config)
        # Nothing depends on how a draft model rounds.
        self.batch_invariant = None if is_draft_model else self._find_batch_invariance()
        if config.model_draft:
            self._load_draft_model(config)

    def _load_draft_model(self, config: ShardConfig) -> None:
        """Load the draft model, unless no draft could be verified. Raises StartupError."""
        if not self.capacity.max_draft_tokens:
            _log.warning("the draft model is not used: the memory of the model cannot be cut back to accepted tokens")
            return
        devices = None
        if config.rpc:
            # Each token of a draft would be sent there and back.
            chosen = config.device_names or [device.name for device in find_devices()]
            devices = [name for name in chosen if not name.startswith("RPC")]
        try:
            draft_model = LlamaCppBackend(config.of_draft_model(self.capacity.current.cells, devices), drafts=True)
        except StartupError as error:
            raise StartupError(f"the draft model: {error}") from error
        self.draft_model = draft_model
        name = draft_model.facts.name
        difference = self.vocabulary.difference(draft_model.vocabulary)
        if difference is not None:
            raise StartupError(f"{name} cannot draft for {self.facts.name}, as it has another vocabulary: {difference}")
        if not draft_model.capacity.max_draft_tokens:
            raise StartupError(f"{name} cannot draft: its memory cannot be cut back to accepted tokens")
        self.facts = replace(self.facts, draft_model=name)

    def _warm_up(self) -> None:
        """Run a forward pass over one token and one over two, to allocate memory and start threads."""
        for count in (1, 2):
            tokens = np.zeros(count, np.int32)
            outputs = np.zeros(count, np.int8)
            outputs[-1] = 1
            batch = TokenBatch(tokens, np.arange(count, dtype=np.int32), np.zeros(count, np.int32), outputs)
            outcome = self.decode(batch)
            if count == 1:
                self._memory.clear()
            if outcome is not DecodeOutcome.OK:
                raise StartupError(f"the first forward pass failed ({outcome.value}); see --log-level debug")

    def _use(self, opened: OpenContext) -> None:
        self._context = opened.context
        self._memory = opened.memory
        self._splits_calls = opened.splits_calls
        self._has_flash_attention = opened.has_flash_attention
        self._ubatch = int(llama_cpp.llama_n_ubatch(opened.context))
        self._gathered: Floats | None = None
        self._logits_address = 0
        self._logits: Floats = np.empty((0, self.vocabulary.size), np.float32)

    def _find_state_format(self) -> None:
        """Find the format of states from the warm-up's tokens, then forget these."""
        self._state_format = None
        if self.capacity.current.saving is not RunSaving.WHOLE_ONLY:
            self._state_format = self._memory.find_format(0)
            if self._state_format is None:
                _log.warning("prefixes cannot be saved: llama.cpp's state of this model has an unknown format")
                nothing = [replace(limits, saving=RunSaving.NOTHING) for limits in self.capacity.layouts]
                self.capacity = replace(self.capacity, layouts=tuple(nothing))
        self._memory.clear()

    def _choose_attention(self, layout: KvLayout) -> None:
        """Leave flash attention where steps are faster without it."""
        longest = self.capacity.current.cells_per_sequence
        with_s = self._step_seconds(longest)
        if with_s is None:
            return
        self._contexts.leave_flash_attention(layout, leave=True)
        without_s = self._step_seconds(longest) if self._replace_context(layout) else None
        leave = without_s is not None and is_worth_leaving(with_s, without_s)
        if not leave:
            self._contexts.leave_flash_attention(layout, leave=False)
            if not self._replace_context(layout):
                raise self._contexts.cannot_open()
        _log.info(
            "flash attention is %s",
            "off: steps are faster without it" if leave else "on",
            extra={"ms_with": round(1e3 * with_s, 1), "ms_without": round(1e3 * (without_s or 0), 1)},
        )

    def _find_batch_invariance(self) -> bool | None:
        if self.capacity.max_draft_tokens == 0:
            return None
        if not self._has_flash_attention:
            # See `split_calls`. A few tokens may be equal by chance: numbers are rounded again after they were added.
            _log.info("drafts can change texts by rounding: without flash attention, one row is added otherwise")
            return False
        started = monotonic()
        measured = BatchInvariance(self.decode, self.logits, self._memory).measure(
            self.capacity.current.cells_per_sequence
        )
        if not measured:
            return None
        seconds = round(monotonic() - started, 2)
        if all(measured.values()):
            _log.info("drafts change no text: tokens have equal logits alone and together", extra={"seconds": seconds})
            return True
        _log.info(
            "drafts can change texts by rounding: tokens have other logits together than alone",
            extra={"cells": min(cells for cells, equal in measured.items() if not equal), "seconds": seconds},
        )
        return False

    def _step_seconds(self, longest: int) -> float | None:
        """Measure a step on one thread: two that wait for each other measure how busy the host is."""
        threads = llama_cpp.llama_n_threads(self._context), llama_cpp.llama_n_threads_batch(self._context)
        llama_cpp.llama_set_n_threads(self._context, 1, 1)
        seconds = step_seconds(self.decode, self._memory, longest)
        llama_cpp.llama_set_n_threads(self._context, *threads)
        return seconds

    def _fingerprint(self, config: ShardConfig) -> str:
        adapters = [(adapter.name, adapter.scale, fingerprint(adapter.path)) for adapter in config.adapters]
        parts = (
            self.facts.fingerprint,
            adapters,
            config.cache_type_k,
            config.cache_type_v,
            self._state_format,
            llama_cpp.__version__,
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """Run llama_decode, more than once if `split_calls` says so, and wait for the logits."""
        outputs = batch.output_count
        most = self.capacity.max_sequences + self.capacity.max_prompt_logprob_tokens
        assert outputs <= most, f"{outputs} outputs of {most}"
        self._adapters.apply(self._context, batch.adapter)
        calls = split_calls(batch, self._ubatch) if self._splits_calls else []
        if len(calls) < 2:
            self._gathered = None
            outcome = self._call(batch)
        else:
            self._gathered = gathered = np.empty((outputs, self.vocabulary.size), np.float32)
            outcome = DecodeOutcome.OK
            for call in calls:
                outcome = self._call(call.batch)
                if outcome is not DecodeOutcome.OK:
                    break
                if call.rows.any():
                    gathered[call.rows] = self._own_logits(call.batch.output_count)
        if outcome is DecodeOutcome.OK:
            self._memory.after_decode(batch)
        return outcome

    def _call(self, batch: TokenBatch) -> DecodeOutcome:
        outcome = _outcome(llama_cpp.llama_decode(self._context, self._batch.fill(batch)))
        llama_cpp.llama_synchronize(self._context)
        return outcome

    def logits(self, rows: int) -> Floats:
        """Return [rows, vocabulary]; a view of llama.cpp's own buffer if the last step was one call."""
        return self._own_logits(rows) if self._gathered is None else self._gathered[:rows]

    def _own_logits(self, rows: int) -> Floats:
        pointer = llama_cpp.llama_get_logits(self._context)
        address = ctypes.cast(pointer, ctypes.c_void_p).value
        assert address, "the last forward pass had no outputs"
        if address != self._logits_address or rows > len(self._logits):
            # The buffer has room for n_seq_max rows at least, and never shrinks.
            shape = (max(rows, self.capacity.max_sequences), self.vocabulary.size)
            self._logits = np.ctypeslib.as_array(pointer, shape)
            self._logits_address = address
        return self._logits[:rows]

    def length(self, sequence_id: int) -> int:
        """Return how many tokens of the sequence are in memory."""
        return self._memory.length(sequence_id)

    def trim(self, sequence_id: int, length: int) -> bool:
        """Call llama_memory_seq_rm to the end."""
        return self._memory.trim(sequence_id, length)

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Call llama_memory_seq_cp."""
        self._memory.copy(source_id, destination_id, length)

    def save(self, sequence_id: int, start: int, end: int, most_bytes: int, *, releasing: bool) -> State | None:
        """Call llama_state_seq_get_data, and cut the state."""
        return self._memory.save(sequence_id, start, end, most_bytes, releasing=releasing)

    def restore(self, sequence_id: int, slices: Sequence[CellSlice], shared: Prefix | None = None) -> bool:
        """Join the states and call llama_state_seq_set_data, and llama_memory_seq_cp for shared cells."""
        return self._memory.restore(sequence_id, slices, shared)

    def set_layout(self, layout: KvLayout) -> bool:
        """Free the context and make another over the same model."""
        old = self.capacity.current.layout
        for one in (layout, old):
            if self._replace_context(one):
                self.capacity = self.capacity.moved_to(one)
                return one is layout
            _log.error("llama.cpp cannot make a context", extra={"layout": one.value})
        raise RuntimeError("there is no context any more")

    def _replace_context(self, layout: KvLayout) -> bool:
        """Free the context, if there is one, and make another; False if llama.cpp cannot."""
        if self._context is not None:
            llama_cpp.llama_free(self._context)
            self._context = None
            self._adapters.forget_context()
        opened = self._contexts.open(layout)
        if opened is None:
            return False
        self._use(opened)
        self._memory.set_format(self._state_format)
        return True

    def embed(self, tokens: Sequence[int]) -> Floats | None:
        """Embed in the second context."""
        assert self._embedder is not None, "embeddings are not served"
        return self._embedder.embed(tokens)

    def close(self) -> None:
        """Free the draft model, the contexts, then the model."""
        if self.draft_model is not None:
            self.draft_model.close()
        if self._embedder is not None:
            self._embedder.close()
        if self._context is not None:
            llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)
