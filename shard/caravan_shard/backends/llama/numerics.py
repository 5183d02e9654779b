"""Finds out at the start how a shard computes, and whether that depends on what else is computed.

Kernels for one row and for several may add in another order, and libraries that were built for another processor may
have other kernels. All of it shows in the bits of logits. What a start found out is kept in a file, so that the next
start with the same flags need not compare them. It also decides the names of cells: those of one name can stand for
each other.
"""

import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np

from caravan_models.contents import Contents
from caravan_shard.arrays import Floats
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.memory.cell_state import StateFormat
from caravan_shard.backends.llama.memory.memory import LlamaMemory
from caravan_shard.backends.llama.memory.recurrent_state import RecurrentFormat
from caravan_shard.config import ShardConfig

# llama.cpp computes attention over a multiple of 256 cells, and flash attention for one row over 512 or more with
# another kernel.
_CONTEXTS = (300, 100)
# K- and IQ-quants have tiles from 8 rows on, flash attention from 64 rows on, and repacked weights are multiplied by
# groups of 4 rows.
_FEW = (8,)
_MANY = (2, 3, 5, 8, 9, 31, 65, 130)
# Larger chunks than this are compared with chunks of this size.
_COMPARED = 8
_FIRST_TOKEN = 3

_log = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True)
class Equality:
    """What was compared with a token that is computed alone. None: it could not be compared.

    ``company``: beside tokens of other sequences. ``chunk``: with other tokens of its own sequence. ``logits``: of the
    token that was computed alone, as hexadecimal digest.
    """

    company: bool | None
    chunk: bool | None
    logits: str


class NumericsProbe:
    """Compares the bits of logits. The memory must be empty, and is empty afterwards."""

    def __init__(
        self,
        decode: Callable[[TokenBatch], DecodeOutcome],
        logits: Callable[[int], Floats],
        memory: LlamaMemory,
        vocabulary_size: int,
    ) -> None:
        self._decode = decode
        self._logits = logits
        self._memory = memory
        self._vocabulary_size = vocabulary_size
        self._digest = hashlib.sha256()

    def measure(self, *, longest: int, sequences: int, rows: int, thorough: bool) -> Equality:
        """Compare. ``longest``: most tokens of a sequence; ``sequences``, ``rows``: most of a step.

        ``thorough``: compare chunks of all sizes that llama.cpp computes in different ways, else of one.
        """
        company: bool | None = None
        chunk: bool | None = None
        try:
            for cells in _CONTEXTS:
                # All sizes once: kernels of products do not depend on the context.
                sizes = _MANY if thorough and chunk is None else _FEW
                counts = [count for count in sizes if cells + count <= longest and count <= rows]
                if counts:
                    company = _both(company, self._same_in_company(cells, min(sequences, rows)))
                    chunk = _both(chunk, self._same_in_chunks(cells, counts))
        finally:
            self._memory.clear()
        return Equality(company, chunk, self._digest.hexdigest())

    def _same_in_company(self, cells: int, sequences: int) -> bool | None:
        """Compare a token behind ``cells`` cells that is computed beside one other sequence, and beside all."""
        if sequences < 2:
            return None
        found = []
        for others in sorted({0, 1, sequences - 1}):
            if not self._fill(cells):
                return None
            # In the order of their ids, or llama.cpp would not compute them together.
            found.append(self._logits_of([(0, cells), *((1 + other, 0) for other in range(others))], 0, cells))
            for other in range(others):
                self._memory.trim(1 + other, 0)
        if found[0] is None or None in found:
            return None
        self._digest.update(found[0])
        return all(one == found[0] for one in found)

    def _same_in_chunks(self, cells: int, counts: Sequence[int]) -> bool | None:
        """Compare the logits after the last token of each chunk, which depend on what was computed for all."""
        for count in counts:
            # Chunks of 8 tokens were compared before larger ones.
            apart = self._last_logits(cells, count, 1 if count <= _COMPARED else _COMPARED)
            together = self._last_logits(cells, count, count)
            if apart is None or together is None:
                return None
            if apart != together:
                return False
        return True

    def _last_logits(self, cells: int, count: int, size: int) -> bytes | None:
        """Compute ``count`` tokens behind ``cells`` cells, ``size`` at a time; return the logits after the last one."""
        if not self._fill(cells):
            return None
        logits = None
        for start in range(0, count, size):
            rows = [(0, cells + place) for place in range(start, min(start + size, count))]
            logits = self._logits_of(rows, len(rows) - 1, cells)
            if logits is None:
                return None
        return logits

    def _fill(self, cells: int) -> bool:
        """Let sequence 0 hold ``cells`` cells, always the same; False if that failed."""
        self._memory.trim(0, 0)
        # They are mixed of three tokens: sums of equal numbers would not show in which order they are added.
        if self._logits_of([(0, place) for place in range(3)], 2, 0) is None:
            return False
        if self._memory.fill_cells(0, cells):
            return True
        self._memory.trim(0, 0)
        return self._logits_of([(0, place) for place in range(cells)], cells - 1, 0) is not None

    def _logits_of(self, rows: Sequence[tuple[int, int]], output: int, first: int) -> bytes | None:
        """Compute tokens, each of a sequence and at a position; return the logits after one, None if that failed.

        The token at a position is always the same one. ``output``: index in ``rows``. ``first``: the first position
        whose token is computed, behind what a sequence holds.
        """
        positions = np.array([position for _, position in rows], np.int32)
        outputs = np.zeros(len(rows), np.int8)
        outputs[output] = 1
        batch = TokenBatch(
            tokens=((_FIRST_TOKEN + 7 * np.abs(positions - first)) % self._vocabulary_size).astype(np.int32),
            positions=positions,
            sequence_ids=np.array([sequence for sequence, _ in rows], np.int32),
            outputs=outputs,
        )
        return self._logits(1)[0].tobytes() if self._decode(batch) is DecodeOutcome.OK else None


def _both(before: bool | None, now: bool | None) -> bool | None:
    if before is None or now is None:
        return before if now is None else now
    return before and now


def known_equality(cache_dir: str, inputs: str, measure: Callable[[], Equality]) -> Equality:
    """Return what a file of ``cache_dir`` says for ``inputs``, or what ``measure`` finds, which is written there.

    ``inputs``: a digest, in hexadecimal, of all that decides how a shard computes: model, flags, build, and features of
    the CPU. Without a folder, and with a file that cannot be read, it is measured. A folder may be shared by processes.
    """
    if not cache_dir:
        return measure()
    path = Path(cache_dir) / f"equality-{inputs[:32]}.json"
    known = _read(path, inputs)
    if known is not None:
        return known
    found = measure()
    _write(path, {"inputs": inputs, **dataclasses.asdict(found)})
    return found


def library_files() -> list[tuple[str, int, int]]:
    """Return name, bytes and time of each library of llama.cpp: another build of a version may have other kernels."""
    found = []
    for path in sorted((Path(llama_cpp.__file__).parent / "lib").glob("*.so*")):
        status = path.stat()
        found.append((path.name, status.st_size, status.st_mtime_ns))
    return found


def _read(path: Path, inputs: str) -> Equality | None:
    try:
        match json.loads(path.read_bytes()):
            case {
                "inputs": str() as written,
                "company": bool() | None as company,
                "chunk": bool() | None as chunk,
                "logits": str() as logits,
            } if written == inputs:
                return Equality(company, chunk, logits)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("a file of --cache-dir cannot be read", extra={"path": str(path), "error": str(error)})
    return None


def _write(path: Path, content: dict[str, object]) -> None:
    """Write a file that others see only once it is complete. A shard starts without it as well."""
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_text(json.dumps(content))
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("cannot write a file of --cache-dir", extra={"path": str(path), "error": str(error)})
