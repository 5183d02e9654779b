"""Names of the cells that a shard computes: cells of one name can stand for each other."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp

from caravan_models.contents import Contents
from caravan_shard.backends.llama.cell_state import StateFormat
from caravan_shard.backends.llama.recurrent_state import RecurrentFormat
from caravan_shard.config import ShardConfig


def digest(*parts: object) -> str:
    """Return the SHA-256 of values that print alike where they are equal."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CellNames:
    """Names for what is in files. ``numerics``: of cells that another kind of shard would compute otherwise."""

    config: ShardConfig
    form: StateFormat | RecurrentFormat | None
    numerics: tuple[str, ...] = ()

    def of(self, contents: Contents) -> str:
        """Return the name of the cells of files with these contents."""
        projector = (contents.projector,) if contents.projector else ()
        return digest(self.of_texts(contents.model, contents.adapters), *projector, *self.numerics)

    def of_texts(self, model: str, adapters: Sequence[str]) -> str:
        """Return the name of the cells of a model and adapters that these texts stand for, without a projector."""
        config = self.config
        return digest(
            model,
            [(adapter.name, adapter.scale, text) for adapter, text in zip(config.adapters, adapters, strict=True)],
            config.cache_type_k,
            config.cache_type_v,
            self.form,
            llama_cpp.__version__,
            # Cells that were saved before there were such flags stay valid.
            *config.rope_changes,
        )
