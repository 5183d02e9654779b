"""Runs a node of flash attention in ggml and in double precision, and programs of `kernels/` with gcc's sanitizers."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.kernels.cpu_libraries import cpu_libraries

Doubles = NDArray[np.float64]
_F32, _F16, _Q8_0 = 0, 1, 8
_MEMORY = 256 << 20


class _Parameters(ctypes.Structure):
    _fields_ = (("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@dataclass(frozen=True, kw_only=True)
class Attention:
    """The inputs of a node.

    ``queries``: [streams, heads, rows, size]. ``keys``, ``values``: [streams, cells, heads of keys, size], or another
    size of values.
    ``mask``: [streams, rows, cells], which is added to the scores. ``sinks``: a score for each head. ``kind``: what
    keys and values are stored as, float16, float32 or q8_0.
    """

    queries: Floats
    keys: Floats
    values: Floats
    mask: NDArray[np.float16] | None = None
    sinks: Floats | None = None
    kind: str = "float16"
    scale: float = field(default=0.125)
    max_bias: float = 0.0
    cap: float = 0.0

    @classmethod
    def random(cls, *, streams: int, group: int, heads: int, rows: int, cells: int, size: int, seed: int = 1) -> Self:
        """Draw numbers of a size that gives some cells most of the weight."""
        source = np.random.default_rng(seed)

        def drawn(*shape: int) -> Floats:
            return source.normal(0, 1.5, shape).astype(np.float32)

        return cls(
            queries=drawn(streams, group * heads, rows, size),
            keys=drawn(streams, cells, heads, size),
            values=drawn(streams, cells, heads, size),
        )

    def of_rows(self, rows: slice) -> Self:
        """Return the node for some of the rows."""
        mask = None if self.mask is None else self.mask[:, rows]
        return replace(self, queries=self.queries[:, :, rows], mask=mask)

    def stored(self, numbers: Floats) -> Floats:
        """Return keys or values as they are after they were stored."""
        if self.kind == "q8_0":
            blocks = numbers.reshape(*numbers.shape[:-1], -1, 32)
            scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
            quanta = np.round(blocks / (np.abs(blocks).max(-1, keepdims=True) / 127))
            restored: Floats = (quanta * scales).reshape(numbers.shape).astype(np.float32)
            return restored
        return numbers.astype(self.kind).astype(np.float32)


def expected(case: Attention) -> Doubles:
    """Return [streams, rows, heads, size] in double precision."""
    keys, values = (case.stored(one).astype(np.float64) for one in (case.keys, case.values))
    streams, heads, rows, _ = case.queries.shape
    group = heads // keys.shape[2]
    slopes = np.ones(heads)
    if case.max_bias:
        even = 1 << (heads.bit_length() - 1)
        low, high = 2 ** (-case.max_bias / even), 2 ** (-case.max_bias / 2 / even)
        slopes = np.array(
            [low ** (head + 1) if head < even else high ** (2 * (head - even) + 1) for head in range(heads)]
        )
    found = np.zeros((streams, rows, heads, values.shape[-1]))
    for stream in range(streams):
        for head in range(heads):
            own = keys[stream, :, head // group], values[stream, :, head // group]
            scores = case.queries[stream, head].astype(np.float64) @ own[0].T * case.scale
            if case.cap:
                scores = case.cap * np.tanh(scores / case.cap)
            if case.mask is not None:
                scores = scores + slopes[head] * case.mask[stream].astype(np.float64)
            if case.sinks is not None:
                scores = np.concatenate([scores, np.full((rows, 1), case.sinks[head])], axis=1)
            highest = scores.max(-1, keepdims=True)
            weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
            total = np.maximum(weights.sum(-1, keepdims=True), np.finfo(np.float64).tiny)
            found[stream, :, head] = (weights / total)[:, : keys.shape[1]] @ own[1]
    return found


def computed(case: Attention, *, threads: int = 1) -> Floats:
    """Return what ggml computes: [streams, rows, heads, size]."""
    with _Graph() as graph:
        queries = graph.tensor(case.queries)
        keys, values = (graph.stored(case, one) for one in (case.keys, case.values))
        mask = None if case.mask is None else graph.tensor(case.mask[:, None])
        node = graph.call("ggml_flash_attn_ext", queries, keys, values, mask, case.scale, case.max_bias, case.cap)
        if case.sinks is not None:
            graph.call("ggml_flash_attn_ext_add_sinks", node, graph.tensor(case.sinks))
        streams, heads, rows, _ = case.queries.shape
        return graph.result(node, (streams, rows, heads, case.values.shape[-1]), threads)


@contextmanager
def row_by_row() -> Iterator[None]:
    """Let attention compute each row by itself, as with --exact."""
    variables = [ctypes.c_int.in_dll(library, "caravan_row_by_row") for library in cpu_libraries()]
    before = [variable.value for variable in variables]
    try:
        for variable in variables:
            variable.value = 1
        yield
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.value = value


class _Graph:
    """A context of ggml, whose tensors are made of arrays."""

    def __init__(self) -> None:
        self._libraries = cpu_libraries()
        self._function("ggml_cpu_init", None)()
        self._context = self._function("ggml_init", ctypes.c_void_p)(_Parameters(_MEMORY, None, False))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._function("ggml_free", None)(ctypes.c_void_p(self._context))

    def _function(self, name: str, returned: Any) -> Any:
        for library in self._libraries:
            try:
                found = library[name]
            except AttributeError:
                continue
            found.restype = returned
            return found
        raise LookupError(name)

    def call(self, name: str, *arguments: float | None) -> int:
        """Call a function whose integers are pointers; return the one that it returns."""
        pointers = [ctypes.c_float(one) if isinstance(one, float) else ctypes.c_void_p(one) for one in arguments]
        first = () if name == "ggml_flash_attn_ext_add_sinks" else (ctypes.c_void_p(self._context),)
        return self._function(name, ctypes.c_void_p)(*first, *pointers) or 0

    def _make(self, kind: int, shape: tuple[int, ...], data: bytes) -> int:
        sizes = [ctypes.c_int64(size) for size in (*reversed(shape), 1, 1, 1)[:4]]
        make = self._function("ggml_new_tensor_4d", ctypes.c_void_p)
        tensor = int(make(ctypes.c_void_p(self._context), kind, *sizes))
        address = self._function("ggml_get_data", ctypes.c_void_p)(ctypes.c_void_p(tensor))
        ctypes.memmove(address, data, len(data))
        return tensor

    def tensor(self, array: NDArray[Any]) -> int:
        """Make a tensor of floats or halves."""
        kind = _F16 if array.dtype == np.float16 else _F32
        return self._make(kind, array.shape, np.ascontiguousarray(array).tobytes())

    def stored(self, case: Attention, numbers: Floats) -> int:
        """Make a tensor of keys or values, in the order that attention wants."""
        if case.kind == "q8_0":
            rows = numbers.size // numbers.shape[-1]
            data = ctypes.create_string_buffer(numbers.size // 32 * 34)
            source = np.ascontiguousarray(numbers).ctypes.data_as(ctypes.c_void_p)
            quantize = self._function("ggml_quantize_chunk", ctypes.c_size_t)
            size = ctypes.c_int64(numbers.shape[-1])
            quantize(_Q8_0, source, data, ctypes.c_int64(0), ctypes.c_int64(rows), size, None)
            tensor = self._make(_Q8_0, numbers.shape, data.raw)
        else:
            tensor = self.tensor(numbers.astype(case.kind))
        permute = self._function("ggml_permute", ctypes.c_void_p)
        return int(permute(ctypes.c_void_p(self._context), ctypes.c_void_p(tensor), 0, 2, 1, 3))

    def result(self, node: int, shape: tuple[int, ...], threads: int) -> Floats:
        """Compute ``node`` and return its floats."""
        graph = ctypes.c_void_p(self.call("ggml_new_graph"))
        self._function("ggml_build_forward_expand", None)(graph, ctypes.c_void_p(node))
        compute = self._function("ggml_graph_compute_with_ctx", ctypes.c_int)
        assert compute(ctypes.c_void_p(self._context), graph, threads) == 0
        address = self._function("ggml_get_data", ctypes.c_void_p)(ctypes.c_void_p(node))
        count = int(np.prod(shape))
        return (
            np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_float)), (count,)).reshape(shape).copy()
        )


_KERNELS = Path(__file__).parents[2] / "shard" / "kernels"
_PROGRAMS = _KERNELS / "tests"
_FLAGS = ("-std=gnu11", "-O1", "-g", "-fno-omit-frame-pointer", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror")
_GGML_HEADERS = ("ggml-backend.h", "ggml-cpu.h", "ggml-cpu-impl.h", "ops.h", "llamafile/sgemm.h", "tiled/tiled.h")
_LIMIT_S = 240

MEMORY = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all")
"""Memory that is not the program's, and what C does not define."""
RACES = ("-fsanitize=thread",)
"""Memory that threads use at once, though at least one of them writes."""


@dataclass(frozen=True, slots=True)
class Checker:
    """A program that calls functions of ``sources`` in `src/` and checks what they do.

    ``own``: its sources in `tests/`. ``given``: what it is called with. ``flags``: further ones of the compiler.
    """

    own: tuple[str, ...]
    sources: tuple[str, ...]
    given: tuple[str, ...]
    flags: tuple[str, ...] = ("-pthread",)

    @property
    def name(self) -> str:
        """What it checks."""
        return self.own[0].removesuffix("_check.c")


@dataclass(frozen=True, slots=True)
class Change:
    """A change of a file in `src/` or `include/`, in which ``before`` occurs once."""

    file: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, and what it has written."""

    status: int
    output: str


def run(checker: Checker, folder: Path, *flags: str, change: Change | None = None) -> Ended:
    """Compile in ``folder`` with these flags, run, and return how it ended. ``change``: of a copy of the sources."""
    # One folder of both, as a change names a file of either.
    kernels = folder / "kernels"
    kernels.mkdir()
    for path in (*_KERNELS.glob("src/*.c"), *_KERNELS.glob("include/*.h")):
        shutil.copy(path, kernels)
    if change is not None:
        code = (kernels / change.file).read_text()
        assert code.count(change.before) == 1, f"{change.before!r} is not once in {change.file}"
        (kernels / change.file).write_text(code.replace(change.before, change.after))
    for name in _GGML_HEADERS:
        header = folder / "ggml" / name
        header.parent.mkdir(parents=True, exist_ok=True)
        header.write_text('#include "ggml_stand_in.h"\n')
    sources = [*(_PROGRAMS / name for name in checker.own), *(kernels / name for name in checker.sources)]
    places = [f"-I{place}" for place in (kernels, _PROGRAMS, folder / "ggml")]
    program = folder / "program"
    command = ["gcc", *_FLAGS, *checker.flags, *flags, *places, *map(str, sources), "-lm", "-o", str(program)]
    subprocess.run(command, check=True, timeout=_LIMIT_S)
    # gcc 12's ThreadSanitizer does not find its memory where addresses are as random as newer kernels make them.
    fixed_addresses = ["setarch", "--addr-no-randomize"] if flags[: len(RACES)] == RACES else []
    ended = subprocess.run(
        [*fixed_addresses, str(program), *checker.given],
        env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "halt_on_error=1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout)
