"""The backend of a model that embeds texts and can do nothing else, such as BERT: it has no KV cache."""

import hashlib
import logging
from collections.abc import Sequence
from typing import Any

from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_proto.messages.model import Numerics
from caravan_shard.adapter_file import AdapterFile
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import Capacity, FileContents
from caravan_shard.backends.llama.embeddings.embedder import LlamaEmbedder
from caravan_shard.backends.llama.kernels.kernels_abi import installed_kernels
from caravan_shard.backends.llama.model.loading import LoadedModel
from caravan_shard.backends.llama.sampling.filter import LlamaFilter
from caravan_shard.config import ShardConfig
from caravan_shard.sampling.joint_draw import leave_all
from caravan_shard.sampling.logprobs import leave_all_logprobs
from caravan_shard.startup_error import StartupError

_log = logging.getLogger(__name__)


class NoAdapters:
    """Says why a model that only embeds has no adapters."""

    def load(self, key: str, file: AdapterFile) -> str:
        """Return why none is loaded."""
        return "the model only embeds texts, and vectors are the model's own"

    def unload(self, key: str) -> None:
        """Not called: none is loaded."""


class LlamaEmbeddingBackend:
    """A Backend without cells and sequences: `embed` is all that may be called. The flag --embeddings is not needed."""

    def __init__(self, config: ShardConfig, loaded: LoadedModel) -> None:
        """Warm up; raises StartupError. Takes over ``loaded``."""
        self._loaded = loaded
        self._embedder: LlamaEmbedder | None = None
        try:
            self._check(config)
            self._embedder = embedder = LlamaEmbedder(loaded.pointer, config, loaded.facts, generates=False)
        except BaseException:
            self.close()
            raise
        self.facts = loaded.facts
        self.vocabulary = loaded.vocabulary
        self.candidate_filter = LlamaFilter(self.vocabulary.size)
        self.joint_draw = leave_all
        self.joint_logprobs = leave_all_logprobs
        self.gives_candidates = False
        self.media = None
        self.draft_model = None
        self.numerics = Numerics(
            fingerprint=_fingerprint(self.facts.fingerprint, config)[:16], kernels=installed_kernels()
        )
        # No cells are saved.
        self.contents = FileContents(loaded.files, lambda _contents: "")
        none = LayoutLimits(
            layout=KvLayout.UNIFIED,
            cells=0,
            cells_per_sequence=0,
            saving=Saving.NOTHING,
        )
        self.capacity = Capacity(
            layouts=(none,),
            max_sequences=0,
            max_batch_tokens=0,
            max_prompt_logprob_tokens=0,
            embedding_size=embedder.size,
            max_embed_tokens=embedder.max_tokens,
            joint_embed=embedder.joint,
            ranks=embedder.ranks,
        )
        _log.info(
            "model ready: it only embeds texts, so it needs no KV cells",
            extra={
                "longest_text": embedder.max_tokens,
                "dimensions": embedder.size,
                "threads_batch": config.batch_threads,
                "texts_side_by_side": embedder.joint.lanes,
            },
        )

    def _check(self, config: ShardConfig) -> None:
        """Raise StartupError if flags ask for what such a model cannot do."""
        name = self._loaded.facts.name
        if config.lora:
            raise StartupError(f"{name} only embeds texts, and vectors are the model's own: drop --lora")
        if config.exact:
            raise StartupError(f"{name} only embeds texts, and vectors are not compared: drop --exact")
        if config.model_draft:
            raise StartupError(f"{name} only embeds texts, so there is nothing to draft: drop --model-draft")

    def embed(self, texts: Sequence[Sequence[int]], lane: int | None = None) -> list[Floats | None]:
        """Embed texts."""
        assert self._embedder is not None
        return self._embedder.embed(texts, lane)

    def _not_called(self, *_args: Any, **_kwargs: Any) -> Any:
        """Not called: there are no cells, no sequences, and one layout."""
        raise NotImplementedError

    @property
    def adapters(self) -> NoAdapters:
        """Loads none."""
        return NoAdapters()

    decode = logits = candidates = length = trim = copy = save = restore = set_layout = _not_called
    clear_free_cells = _not_called

    def close(self) -> None:
        """Wait for the users of the model. Free the context, then the model."""
        self._loaded.vocabulary.users.end()
        if self._embedder is not None:
            self._embedder.close()
        self._loaded.close()


def _fingerprint(of_model: str, config: ShardConfig) -> str:
    if not config.rope_changes:
        return of_model
    return hashlib.sha256(repr((of_model, config.rope_changes)).encode()).hexdigest()
