"""Finds out what a shard would take, before it takes anything: llama.cpp plans a load without memory.

llama.cpp says how much memory a model and its context take in each kind of buffer by a C++ function, which returns a
``std::map<ggml_backend_buffer_type_t, llama_memory_breakdown_data>`` by value, from ``src/llama-ext.h``. Here it is
called by its mangled name, and the map is read as libstdc++ lays it out (``bits/stl_tree.h``): a header whose parent is
the root of a tree of nodes, each with its value behind its links.
"""

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp

# llama.cpp by way of libllama: with LLAMA_CPP_LIB_PATH, llama_cpp._ggml would load a second one.
from llama_cpp.llama_cpp import _lib as libllama

from caravan_proto.host_memory import available_memory
from caravan_shard.backends.llama.devices.cells import CELL_BYTES, tables_fit
from caravan_shard.backends.llama.devices.devices import Device, drafting_devices
from caravan_shard.backends.llama.embeddings.plan import plan_embedding
from caravan_shard.backends.llama.heads.found import wants_head
from caravan_shard.backends.llama.heads.head_file import HeadFile, head_file
from caravan_shard.backends.llama.heads.mtp import mtp_parameters
from caravan_shard.backends.llama.heads.opened_file import file_head_parameters, state_size
from caravan_shard.backends.llama.heads.states import state_bytes
from caravan_shard.backends.llama.media.projector_file import find_projector
from caravan_shard.backends.llama.memory.context import Contexts
from caravan_shard.backends.llama.model.loading import measured_model, metadata_text, only_embeds
from caravan_shard.config import ShardConfig
from caravan_shard.memory_need import HOST, MemoryNeed, Part, in_words
from caravan_shard.startup_error import StartupError

_FUNCTION = "_Z26llama_get_memory_breakdownPK13llama_context"
# enum ggml_backend_dev_type: GPUs, and those that share the host's memory.
_GPU_TYPES = (1, 2)
# More than there are kinds of buffers.
_MOST_KINDS = 256

# Measured after the start, without buffers and cells: 46 MiB with a vocabulary of 261 tokens, 102 MiB with 49,152, and
# 246 MiB with 262,144. llama.cpp, the constraints and the tokenizer each have tables of the vocabulary.
_PROGRAM_BYTES = 48 << 20
_TOKEN_BYTES = 1 << 10


class _Tree(ctypes.Structure):
    _fields_ = (
        ("compare", ctypes.c_size_t),
        ("color", ctypes.c_int),
        ("root", ctypes.c_void_p),
        ("leftmost", ctypes.c_void_p),
        ("rightmost", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
    )


class _Node(ctypes.Structure):
    _fields_ = (
        ("color", ctypes.c_int),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("buffer_type", ctypes.c_void_p),
        ("model", ctypes.c_size_t),
        ("context", ctypes.c_size_t),
        ("compute", ctypes.c_size_t),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferUse:
    """Bytes in one kind of buffer. ``place``: a device's name or `HOST`.

    ``mappable``: weights in it may be pages of the file. Others are copies in another order.
    """

    place: str
    mappable: bool
    model: int
    context: int
    compute: int


def memory_breakdown(context: Any) -> list[BufferUse] | None:
    """Return what ``context``, a llama_context, and its model take; None if this build of llama.cpp does not tell.

    Its nodes, some hundred bytes, are not freed: whose they are, only C++ knows.
    """
    function = getattr(libllama, _FUNCTION, None)
    if function is None:
        return None
    function.argtypes = [ctypes.c_void_p]
    function.restype = _Tree
    tree = function(context)
    # libc++ has another layout, whose last fields are not written.
    if not (0 < tree.count <= _MOST_KINDS and tree.color == 0 and tree.root):
        return None
    return [_use(node) for node in _nodes(tree.root)]


def _nodes(address: int | None) -> Iterator[Any]:
    if address:
        node = _Node.from_address(address)
        yield from _nodes(node.left)
        yield node
        yield from _nodes(node.right)


def _use(node: Any) -> BufferUse:
    kind = ctypes.c_void_p(node.buffer_type)
    libllama.ggml_backend_buft_is_host.restype = ctypes.c_bool
    libllama.ggml_backend_buft_get_device.restype = ctypes.c_void_p
    libllama.ggml_backend_dev_name.restype = ctypes.c_char_p
    is_host = bool(libllama.ggml_backend_buft_is_host(kind))
    device = ctypes.c_void_p(libllama.ggml_backend_buft_get_device(kind))
    on_device = not is_host and device.value and libllama.ggml_backend_dev_type(device) in _GPU_TYPES
    return BufferUse(
        place=libllama.ggml_backend_dev_name(device).decode() if on_device else HOST,
        mappable=is_host,
        model=node.model,
        context=node.context,
        compute=node.compute,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """``layers``: without the output layer. ``has_experts``: some of its weights are a mixture of experts."""

    layers: int
    has_experts: bool
    trained_context: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a model takes with certain flags. ``need`` is None if this build of llama.cpp does not tell.

    ``cells``: of all sequences; 0 for a model that only embeds.
    """

    shape: ModelShape
    need: MemoryNeed | None
    cells: int


def measure(config: ShardConfig, devices: Sequence[Device]) -> Measured:
    """Return what ``config`` would take, with ``devices`` to choose from. Raises StartupError as a start would.

    Takes about as long as llama.cpp reads the vocabulary.
    """
    with measured_model(config, devices) as model:
        shape, tables = _shape(model), _tables(model)
        if only_embeds(model):
            alone = _embedding_need(model, config, generates=False)
            return Measured(shape=shape, need=None if alone is None else alone + tables, cells=0)
        contexts = Contexts(model, config, shape.trained_context)
        cells = contexts.limits(contexts.layouts[0]).cells
        _check_tables(cells)
        of_layouts = [
            _need(model, contexts.parameters(layout), config, contexts.cannot_open()) for layout in contexts.layouts
        ]
        # There is one context at a time.
        known = [one for one in of_layouts if one is not None]
        need = max(known, key=lambda one: sum(one.places.values())) + tables if known else None
        if need is not None:
            need += MemoryNeed((Part(HOST, "cell_tables", CELL_BYTES * cells),))
        if config.embeddings and need is not None:
            need += _without_weights(_embedding_need(model, config, generates=True))
        if wants_head(config) and need is not None:
            need += _mtp_need(model, contexts, config)
        file = head_file(config)
        if file is not None and need is not None:
            need += _head_file_need(model, contexts, file, config, devices)
    if need is not None:
        need += _adapters(config, need)
        need += _projector(config, need)
    if config.model_draft and file is None and need is not None:
        try:
            draft = measure(config.of_draft_model(cells, drafting_devices(config, devices)), devices).need
        except StartupError as error:
            raise StartupError(f"the draft model: {error}") from error
        need += _of_draft([part for part in draft.parts if part.what != "program"] if draft is not None else [])
    return Measured(shape=shape, need=need, cells=cells)


def _of_draft(parts: Sequence[Part]) -> MemoryNeed:
    return MemoryNeed(tuple(Part(part.place, f"draft_{part.what}", part.size) for part in parts))


def _mtp_need(model: Any, contexts: Contexts, config: ShardConfig) -> MemoryNeed:
    """Return what the model's own head takes beside its weights, which are among those of the model."""
    parameters = mtp_parameters(contexts, config.parallel)
    found = _need(model, parameters, config, StartupError("llama.cpp cannot make a context for the head of the model"))
    parts = [] if found is None else [part for part in found.parts if not part.what.endswith("weights")]
    size = int(llama_cpp.llama_model_n_embd_out(model))
    # Both contexts hand out those of a batch.
    handed_out = 2 * 4 * size * parameters.n_batch
    return _of_draft([*parts, Part(HOST, "states", _kept_bytes(contexts, config, size) + handed_out)])


def _head_file_need(
    model: Any, contexts: Contexts, file: HeadFile, config: ShardConfig, devices: Sequence[Device]
) -> MemoryNeed:
    """Return what a head in a file of its own takes."""
    cells = contexts.limits(contexts.layouts[0]).cells
    of_head = config.of_draft_model(cells, drafting_devices(config, devices))
    error = StartupError(f"llama.cpp cannot make a context for the {file.kind.method} head")
    with measured_model(of_head, devices, is_head=True) as head:
        context = llama_cpp.llama_init_from_model(model, contexts.parameters(contexts.layouts[0]))
        if not context:
            raise contexts.cannot_open()
        try:
            of_file = Contexts(head, of_head, _shape(head).trained_context)
            parameters = file_head_parameters(of_file, config.parallel, context, file)
            found = _need(head, parameters, of_head, error)
        finally:
            llama_cpp.llama_free(context)
        size, embedding = state_size(model, head, file), int(llama_cpp.llama_model_n_embd(model))
        handed_out = len(file.layers) * embedding * contexts.batch_tokens
        if file.block is None:
            handed_out += int(llama_cpp.llama_model_n_embd(head)) * parameters.n_batch
        states = Part(HOST, "states", _kept_bytes(contexts, config, size) + 4 * handed_out)
        tables = [part for part in _tables(head).parts if part.what != "program"]
    return _of_draft([*(found.parts if found is not None else ()), *tables, states])


def _kept_bytes(contexts: Contexts, config: ShardConfig, size: int) -> int:
    return state_bytes(config.parallel, size, contexts.limits(contexts.layouts[0]).cells_per_sequence)


def _check_tables(cells: int) -> None:
    """Raise StartupError if finding out what so many cells take would take too much: only their tables are made."""
    available = available_memory()
    if available is not None and not tables_fit(cells, available):
        raise StartupError(
            f"{cells} cells need {in_words(CELL_BYTES * cells)} for their tables alone, and {in_words(available)} of "
            "the host's memory are free: pass a smaller -c"
        )


def _shape(model: Any) -> ModelShape:
    experts = metadata_text(model, f"{metadata_text(model, 'general.architecture')}.expert_count")
    return ModelShape(
        layers=int(llama_cpp.llama_model_n_layer(model)),
        has_experts=experts.isdecimal() and int(experts) > 0,
        trained_context=int(llama_cpp.llama_model_n_ctx_train(model)),
    )


def _embedding_need(model: Any, config: ShardConfig, *, generates: bool) -> MemoryNeed | None:
    plan = plan_embedding(model, config, generates=generates)
    error = StartupError(f"llama.cpp cannot make a context of {plan.pass_tokens} cells for embeddings")
    first, *lanes = plan.contexts(config)
    need = _need(model, first, config, error)
    if need is None:
        return None
    if not generates:
        # The contexts of lanes are alike.
        of_lane = _without_weights(_need(model, lanes[0], config, error)) if lanes else MemoryNeed()
        return sum((of_lane for _ in lanes), need)
    if plan.by_states:
        return need
    # Nobody reads them, but llama.cpp makes the logits of every token.
    return need + MemoryNeed((_logits(model, plan.pass_tokens),))


def _without_weights(need: MemoryNeed | None) -> MemoryNeed:
    parts = need.parts if need is not None else ()
    return MemoryNeed(
        tuple(Part(part.place, "embeddings", part.size) for part in parts if not part.what.endswith("weights"))
    )


def _need(model: Any, parameters: Any, config: ShardConfig, error: StartupError) -> MemoryNeed | None:
    """Return what the model and a context take. Raises ``error`` if llama.cpp cannot make the context."""
    context = llama_cpp.llama_init_from_model(model, parameters)
    if not context:
        raise error
    try:
        uses = memory_breakdown(context)
    finally:
        llama_cpp.llama_free(context)
    if uses is None:
        return None
    parts = [part for use in uses for part in _parts(use, config)]
    if not parameters.embeddings:
        parts.append(_logits(model, parameters.n_outputs_max))
    return MemoryNeed(tuple(parts))


def _parts(use: BufferUse, config: ShardConfig) -> list[Part]:
    weights = "mapped_weights" if config.mmap and use.place == HOST and use.mappable else "weights"
    return [
        Part(use.place, weights, use.model),
        Part(use.place, "cells", use.context),
        Part(use.place, "compute_buffers", use.compute),
    ]


def _tables(model: Any) -> MemoryNeed:
    """Return what a shard takes beside llama.cpp's buffers."""
    tokens = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model)))
    return MemoryNeed((Part(HOST, "program", _PROGRAM_BYTES), Part(HOST, "vocabulary", _TOKEN_BYTES * tokens)))


def _logits(model: Any, rows: int) -> Part:
    """Return the rows of logits that llama.cpp keeps for its caller, which are not among its buffers."""
    return Part(HOST, "logits", 4 * rows * int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))))


def _adapters(config: ShardConfig, need: MemoryNeed) -> MemoryNeed:
    """Return the adapters' files. Their tensors lie where those of the model do; here, where most of these are."""
    size = sum(adapter.path.stat().st_size for adapter in config.adapters)
    return MemoryNeed((Part(_place_of_weights(need), "adapters", size),))


def _projector(config: ShardConfig, need: MemoryNeed) -> MemoryNeed:
    """Return the projector's file, without the buffers of an encoding, and what is kept of encoded media."""
    path = find_projector(config)
    if path is None:
        return MemoryNeed()
    return MemoryNeed(
        (
            Part(_place_of_weights(need), "projector", path.stat().st_size),
            Part(HOST, "media_cache", config.media_cache_bytes),
        )
    )


def _place_of_weights(need: MemoryNeed) -> str:
    weights = [part for part in need.parts if part.what.endswith("weights")]
    return max(weights, key=lambda part: part.size).place if weights else HOST
