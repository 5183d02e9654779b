"""The backend over llama.cpp: one model, one context (and a second one for embeddings), one thread."""

import contextlib
import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

import llama_cpp
import numpy as np

from caravan_models.contents import fingerprint
from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout, Saving
from caravan_proto.messages.model import Numerics
from caravan_shard.arrays import Floats, State
from caravan_shard.backends.base import Capacity, CellSlice, DecodeOutcome, FileContents, JointEmbed, TokenBatch
from caravan_shard.backends.given_embeddings import EmbeddingsEncoder
from caravan_shard.backends.llama.devices.devices import drafting_devices, find_devices
from caravan_shard.backends.llama.embeddings.embedder import LlamaEmbedder
from caravan_shard.backends.llama.forward import LlamaForward
from caravan_shard.backends.llama.heads.dflash import DflashHead
from caravan_shard.backends.llama.heads.eagle3 import Eagle3Head
from caravan_shard.backends.llama.heads.head import LlamaHead
from caravan_shard.backends.llama.heads.mtp import MtpHead
from caravan_shard.backends.llama.heads.opened_file import OpenedFile
from caravan_shard.backends.llama.kernels.joint_draw import draw_threads, find_joint_draw
from caravan_shard.backends.llama.kernels.joint_logprobs import find_joint_logprobs
from caravan_shard.backends.llama.kernels.kernels_abi import installed_kernels
from caravan_shard.backends.llama.kernels.row_by_row import ROW_BY_ROW, has_own_kernels
from caravan_shard.backends.llama.media.projector_file import load_projector
from caravan_shard.backends.llama.memory.cell_state import StateFormat
from caravan_shard.backends.llama.memory.context import Contexts, OpenContext, position_dimensions, reads_tokens_only
from caravan_shard.backends.llama.memory.memory import clear_free_cells
from caravan_shard.backends.llama.memory.recurrent import RecurrentMemory, RollbackMemory, what_restoring_changes
from caravan_shard.backends.llama.model.adapters import LlamaAdapters
from caravan_shard.backends.llama.model.loading import LoadedModel, open_model
from caravan_shard.backends.llama.model.vocabulary import LlamaVocabulary
from caravan_shard.backends.llama.numerics import CellNames, NumericsProbe, digest, known_equality, library_files
from caravan_shard.backends.llama.sampling.candidates import PATIENCE, DeviceCandidates, chooses_candidates
from caravan_shard.backends.llama.sampling.filter import LlamaFilter
from caravan_shard.config import ShardConfig
from caravan_shard.media import CellSpan, MediaEncoder
from caravan_shard.sampling.top_candidates import StepCandidates
from caravan_shard.startup_error import StartupError

_log = logging.getLogger(__name__)


class LlamaCppBackend:
    """A Backend. The thread that makes it must also use it: OpenMP keeps a thread pool per calling thread."""

    media: MediaEncoder | None
    # As a draft model, it has read draft tokens like others.
    keeps_drafts = True
    block = None

    def __init__(self, config: ShardConfig, loaded: LoadedModel | None = None, *, drafts: bool = False) -> None:
        """Load the model, unless it is ``loaded``, and warm up; raises StartupError. ``drafts``: for another model."""
        started = monotonic()
        self._on_close = contextlib.ExitStack()
        if not drafts:  # a draft model's rounding does not matter
            ROW_BY_ROW.acquire(exact=config.exact)
            self._on_close.callback(ROW_BY_ROW.release)
        with self._on_close.pop_all() as on_failure:
            loaded = open_model(config) if loaded is None else loaded
            self._on_close = on_failure.pop_all()
        self._on_close.callback(loaded.close)
        self._context: Any = None
        self.media = None
        self._embedder: LlamaEmbedder | None = None
        self.draft_model: LlamaCppBackend | LlamaHead | None = None
        self._head: LlamaHead | None = None
        try:
            self._set_up(loaded, config, is_draft_model=drafts)
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

    def _set_up(self, loaded: LoadedModel, config: ShardConfig, *, is_draft_model: bool) -> None:
        """Make the context, measure what depends on the host, and load the draft model. Raises StartupError."""
        self.vocabulary = loaded.vocabulary
        if loaded.only_embeds:
            raise StartupError(f"{loaded.facts.name} embeds texts and cannot generate any")
        self.adapters = LlamaAdapters(loaded.pointer, config.adapters)
        self.facts = replace(loaded.facts, adapters=self.adapters.names)
        self.candidate_filter = LlamaFilter(self.vocabulary.size)
        self.joint_draw = find_joint_draw(draw_threads(config))
        self.joint_logprobs = find_joint_logprobs()
        self._contexts = Contexts(loaded.pointer, config, self.facts.trained_context)
        if not is_draft_model:
            self.media = load_projector(config, loaded.pointer, self._contexts)
        input_size = int(llama_cpp.llama_model_n_embd_inp(loaded.pointer))
        if config.enable_prompt_embeds and not is_draft_model:
            if self.media is not None and position_dimensions(loaded.pointer) > 1:
                raise StartupError(
                    "--enable-prompt-embeds cannot be used with the projector of a model that reads images as grids: "
                    "pass --no-mmproj"
                )
            self.media = EmbeddingsEncoder(input_size, self.media)
        if self.media is not None:
            if reads_tokens_only(loaded.pointer, self.facts.architecture):
                raise StartupError(
                    f"{self.facts.name} reads tokens only: pass --no-mmproj, and leave out --enable-prompt-embeds"
                )
            self.facts = replace(self.facts, media=self.media.facts)
        opened = self._contexts.open(self._contexts.layouts[0])
        if opened is None:
            raise self._contexts.cannot_open()
        if config.embeddings:
            self._embedder = LlamaEmbedder(loaded.pointer, config, self.facts, generates=True)
        self.capacity = Capacity(
            layouts=tuple(self._contexts.limits(layout) for layout in self._contexts.layouts),
            max_sequences=config.parallel,
            max_batch_tokens=self._contexts.batch_tokens,
            max_prompt_logprob_tokens=self._contexts.prompt_logprob_tokens,
            embedding_size=self._embedder.size if self._embedder is not None else 0,
            input_size=input_size,
            max_embed_tokens=self._embedder.max_tokens if self._embedder is not None else 0,
            joint_embed=self._embedder.joint if self._embedder is not None else JointEmbed(texts=1, tokens=0),
            ranks=self._embedder is not None and self._embedder.ranks,
        )
        self._head = self.draft_model = self._open_head(loaded, config)
        self._use(opened)
        if config.rollback_tokens and self.capacity.current.whole_only and not self.capacity.max_draft_tokens:
            _log.warning(
                "there are no drafts: llama.cpp cannot take back tokens of models of this architecture",
                extra={"architecture": self.facts.architecture},
            )
        self._warm_up()
        self._find_state_format()
        names = CellNames(config, self._memory.form)
        self.numerics = self._find_numerics(config, loaded, names, is_draft_model=is_draft_model)
        if config.exact:
            names = replace(names, numerics=(self.numerics.fingerprint,))
        self.contents = FileContents(None if is_draft_model else loaded.files, names.of)
        # A recurrent state cannot be cut back to run a step again.
        self._contexts.take_candidates = not (
            is_draft_model or self.capacity.current.whole_only
        ) and chooses_candidates(config, self)
        if self._contexts.take_candidates:
            self.find_candidates()
        if self._head is not None:
            self._head.forget_model()
        if config.model_draft and loaded.head_file is None:
            self._load_draft_model(config)

    def _open_head(self, loaded: LoadedModel, config: ShardConfig) -> LlamaHead | None:
        """Return the head that drafts, if there is one and its drafts could be verified. Raises StartupError."""
        if not loaded.has_head and loaded.head_file is None:
            return None
        if not self.capacity.max_draft_tokens:
            _log.warning("the head is not used: the memory of the model cannot be cut back; see --rollback-tokens")
            return None
        if loaded.head_file is None:
            self.facts = replace(self.facts, draft_model=f"{self.facts.name} (MTP)")
            return MtpHead(loaded.pointer, self._contexts, self.facts, self.capacity)
        config = config.of_draft_model(self.capacity.current.cells, drafting_devices(config, find_devices()))
        try:
            draft = open_model(config, is_head=True)
        except StartupError as error:
            raise StartupError(f"the draft model: {error}") from error
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(draft.close)
            self._check_vocabulary(draft.facts.name, draft.vocabulary)
            contexts = Contexts(draft.pointer, config, draft.facts.trained_context)
            on_failure.pop_all()
        self.facts = replace(self.facts, draft_model=f"{draft.facts.name} ({loaded.head_file.kind.method})")
        file = OpenedFile(draft, loaded, contexts)
        if loaded.head_file.block is None:
            return Eagle3Head(file, self.facts, self.capacity)
        return DflashHead(file, self.facts, self.capacity)

    def _check_vocabulary(self, name: str, vocabulary: LlamaVocabulary) -> None:
        """Raise StartupError if the draft model ``name`` has other tokens."""
        difference = self.vocabulary.difference(vocabulary)
        if difference is not None:
            raise StartupError(f"{name} cannot draft for {self.facts.name}, as it has another vocabulary: {difference}")

    def _load_draft_model(self, config: ShardConfig) -> None:
        """Load the draft model, unless no draft could be verified. Raises StartupError."""
        if not self.capacity.max_draft_tokens:
            _log.warning("the draft model is not used: the memory of the model cannot be cut back to accepted tokens")
            return
        devices = drafting_devices(config, find_devices())
        try:
            draft_model = LlamaCppBackend(config.of_draft_model(self.capacity.current.cells, devices), drafts=True)
        except StartupError as error:
            raise StartupError(f"the draft model: {error}") from error
        self.draft_model = draft_model
        name = draft_model.facts.name
        self._check_vocabulary(name, draft_model.vocabulary)
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
        self._forward = LlamaForward(opened, self.adapters, self.capacity, self.vocabulary.size)
        if self._head is not None:
            self._forward.use_head(self._head)
        if self._contexts.take_candidates:
            self.find_candidates()

    def find_candidates(self, patience: int = PATIENCE) -> None:
        """Let llama.cpp find candidates from now on, in this context. ``patience``: see `DeviceCandidates`."""
        self._forward.use_device(DeviceCandidates(self._context, self.vocabulary.size, patience))

    def leave_candidates(self) -> None:
        """Let llama.cpp hand over all logits from now on."""
        self._forward.leave_device()

    def _find_state_format(self) -> None:
        """Find the format of states from the warm-up's tokens, then forget these."""
        reason = ""
        form = self._memory.find_format(0)
        if form is None:
            reason = "llama.cpp's state of this model has an unknown format"
        elif isinstance(self._memory, RecurrentMemory):
            reason = what_restoring_changes(self._memory, self.decode, self.logits)
        if reason:
            _log.warning("prefixes cannot be saved: %s", reason)
            nothing = [replace(limits, saving=Saving.NOTHING) for limits in self.capacity.layouts]
            self.capacity = replace(self.capacity, layouts=tuple(nothing))
        self._memory.clear()

    def _find_numerics(
        self, config: ShardConfig, loaded: LoadedModel, names: CellNames, *, is_draft_model: bool
    ) -> Numerics:
        """Compare the logits of tokens alone and together. Raises StartupError if they must be equal and are not."""
        has_flash_attention = config.flash_attn != "off"
        flash_attention = {layout.value: has_flash_attention for layout in self._contexts.layouts}
        if is_draft_model:  # nothing depends on how it rounds
            return Numerics(fingerprint="", flash_attention=flash_attention)
        # What is in the files need not be known yet. Where it matters, their logits differ, too.
        files = self.facts.fingerprint, [fingerprint([adapter.path]) for adapter in config.adapters]
        started = monotonic()
        limits = self.capacity.current
        probe = NumericsProbe(self.decode, self.logits, self._memory, self.vocabulary.size)
        measure = functools.partial(
            probe.measure,
            longest=limits.cells_per_sequence,
            sequences=self.capacity.max_sequences,
            rows=self._forward.ubatch,
            thorough=config.exact,
        )
        inputs = (
            # With hidden states, the last layer computes tokens that need no logits, too.
            *(["hidden states"] if self._head is not None else []),
            names.of_texts(*files),
            has_flash_attention,
            self._forward.ubatch,
            config.exact,
            # Upstream's flash attention divides the cells of a lone row among the threads.
            config.decode_threads if has_flash_attention and not has_own_kernels() else 0,
            # A GPU and the host add in different orders.
            ([device.name for device in find_devices()], config.gpu_layers) if config.uses_gpus else [],
            *config.tensor_overrides,
            llama_cpp.llama_print_system_info(),
        )
        compared = digest(
            *inputs, loaded.files.all, limits.cells_per_sequence, self.capacity.max_sequences, library_files()
        )
        # What --exact promises is compared at each start.
        found = measure() if config.exact else known_equality(config.cache_dir, compared, measure)
        # In a common pool, the places of cells depend on other sequences, also where a comparison finds no difference.
        same_in_company = False if limits.shares_cells and found.company else found.company
        same_in_chunks = found.chunk
        if not config.exact and not has_flash_attention:
            # A few tokens may be equal by chance: numbers are rounded again after they were added.
            same_in_chunks = False
        numerics = Numerics(
            fingerprint=digest(*inputs, found.logits)[:16],
            exact=config.exact,
            flash_attention=flash_attention,
            same_in_company=same_in_company,
            same_in_chunks=same_in_chunks,
            kernels=installed_kernels(),
        )
        _log.debug(
            "compared a token's logits alone and together",
            extra={
                "numerics": numerics.fingerprint,
                "same_in_company": numerics.same_in_company,
                "same_in_chunks": numerics.same_in_chunks,
                "seconds": round(monotonic() - started, 2),
            },
        )
        if config.exact and (found.company is False or not found.chunk):
            raise StartupError(
                "--exact cannot be kept: llama.cpp computes other logits for a token "
                f"{'beside other sequences' if found.company is False else 'in a chunk'} than alone. Its kernels for "
                "several rows must be off, which needs CPUs, and llama.cpp as `make` builds it or with "
                "CMAKE_ARGS=-DGGML_LLAMAFILE=OFF"
            )
        return numerics

    def decode(self, batch: TokenBatch) -> DecodeOutcome:
        """Run llama_decode, more than once with media, and wait for the logits."""
        outcome = self._forward.decode(batch)
        if outcome in (DecodeOutcome.ABORTED, DecodeOutcome.FAILED) and isinstance(self._memory, RollbackMemory):
            self._memory.after_failure(batch)
        return outcome

    def logits(self, rows: int) -> Floats:
        """Return [rows, vocabulary]; a view of llama.cpp's own buffer unless the last step had media."""
        batch = self._forward.without_logits
        if batch is not None:
            # The same batch gives the same logits.
            ids, first = np.unique(batch.sequence_ids, return_index=True)
            for sequence_id, position in zip(ids.tolist(), batch.positions[first].tolist(), strict=True):
                self._memory.trim(sequence_id, position)
            outcome = self.decode(batch._replace(candidates=None))
            if outcome is not DecodeOutcome.OK:
                raise RuntimeError(f"a forward pass that had worked failed when it was run again ({outcome.value})")
        return self._forward.logits(rows)

    @property
    def gives_candidates(self) -> bool:
        """Whether llama.cpp is asked to find the highest logits itself."""
        return self._forward.gives_candidates

    def candidates(self, rows: int) -> StepCandidates | None:
        """Return what llama.cpp has found instead of handing over all logits."""
        return self._forward.candidates(rows)

    def length(self, sequence_id: int) -> int:
        """Return how many tokens of the sequence are in memory."""
        return self._memory.length(sequence_id)

    def readable(self, sequence_id: int) -> range:
        """Return all positions: a draft model reads tokens."""
        return range(self.capacity.current.cells)

    def trim(self, sequence_id: int, length: int) -> bool:
        """Call llama_memory_seq_rm to the end."""
        if self._head is not None:
            self._head.cut_model(sequence_id, length)
        return self._memory.trim(sequence_id, length)

    def clear_free_cells(self) -> None:
        """Do so where cells that a sequence may not see are multiplied by 0, and not skipped as by flash attention."""
        if not self.numerics.flash_attention[self.capacity.current.layout.value]:
            clear_free_cells(self._context)

    def copy(self, source_id: int, destination_id: int, length: int) -> None:
        """Call llama_memory_seq_cp."""
        self._memory.copy(source_id, destination_id, length)
        if self._head is not None:
            self._head.copy_model(source_id, destination_id, length)

    def save(self, sequence_id: int, start: int, end: int, most_bytes: int, *, releasing: bool) -> State | None:
        """Call llama_state_seq_get_data, and cut the state."""
        return self._memory.save(sequence_id, start, end, most_bytes, releasing=releasing)

    def restore(
        self,
        sequence_id: int,
        slices: Sequence[CellSlice],
        shared: PrefixCopy | None = None,
        spans: Sequence[CellSpan] = (),
    ) -> bool:
        """Join the states and call llama_state_seq_set_data, and llama_memory_seq_cp for shared cells."""
        if self._head is not None:
            self._head.cut_model(sequence_id, 0)
        return self._memory.restore(sequence_id, slices, shared, spans)

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
        form = self._memory.form
        if self._context is not None:
            llama_cpp.llama_free(self._context)
            self._forward.close()
            self._context = None
        opened = self._contexts.open(layout)
        if opened is None:
            return False
        self._use(opened)
        if isinstance(form, StateFormat):  # other models have one layout
            self._memory.set_format(form)
        return True

    def embed(self, texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
        """Embed in the second context."""
        assert self._embedder is not None, "embeddings are not served"
        return self._embedder.embed(texts, lane)

    def close(self) -> None:
        """Wait for the users of the model. Free the draft model, the contexts, then the model."""
        self.vocabulary.users.end()
        if self.draft_model is not None:
            self.draft_model.close()
        if self._embedder is not None:
            self._embedder.close()
        if self.media is not None:
            self.media.close()
        if self._context is not None:
            llama_cpp.llama_free(self._context)
            self._forward.close()
        self._on_close.close()
