"""Loads a GGUF file and reads its facts."""

import contextlib
import ctypes
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import llama_cpp

from caravan_models.cached_model import parts_of
from caravan_models.contents import SeenFile, SeenFiles, fingerprint
from caravan_models.errors import FetchError
from caravan_models.gguf_facts import is_encoder
from caravan_models.gguf_header import read_header
from caravan_models.listing import part_names
from caravan_proto.host_memory import locked_memory
from caravan_proto.messages.model import MetadataValue, ModelFile
from caravan_shard.backends.llama.devices.devices import Device, ModelPlacement, first_devices
from caravan_shard.backends.llama.heads.found import wants_head
from caravan_shard.backends.llama.heads.head_file import HeadFile, head_file
from caravan_shard.backends.llama.kernels.kernels_abi import check_kernels
from caravan_shard.backends.llama.media.projector_file import find_projector
from caravan_shard.backends.llama.model.log import route_llama_log, take_reason
from caravan_shard.backends.llama.model.vocabulary import LlamaVocabulary
from caravan_shard.config import ShardConfig
from caravan_shard.startup_error import StartupError

# Longer texts are left out: they are templates and licenses, not facts.
_ROOM = 1024
_NUMBER = re.compile(r"-?[0-9]+")
_FLAGS = {"true": True, "false": False}
_FLOAT = re.compile(r"-?[0-9]+\.[0-9]+")
# The numbers among the keys of every file; its other ones are texts, even "2" of `general.version`.
_GENERAL_NUMBERS = re.compile(r"general\.(alignment|file_type|quantization_version|.*\.count)")

# What routers render at most.
_MAX_BYTES = 256 << 10

_log = logging.getLogger(__name__)

# Between lines about a load that lasts.
_PROGRESS_S = 5.0

_MAGIC = b"GGUF"
# Tokenizers that add a begin or an end where the file wants one. That of BERT always adds both, the others none.
_ADD_TOKENS = frozenset(
    {llama_cpp.LLAMA_VOCAB_TYPE_SPM, llama_cpp.LLAMA_VOCAB_TYPE_BPE, llama_cpp.LLAMA_VOCAB_TYPE_UGM}
)
# By --mmap and --mlock. By default, llama.cpp maps unless a device cannot read what is mapped.
_LOAD_MODES = {
    (True, False): llama_cpp.LLAMA_LOAD_MODE_AUTO,
    (True, True): llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK,
    (False, False): llama_cpp.LLAMA_LOAD_MODE_NONE,
    (False, True): llama_cpp.LLAMA_LOAD_MODE_MLOCK,
}
_NUMA_STRATEGIES = {
    "distribute": llama_cpp.GGML_NUMA_STRATEGY_DISTRIBUTE,
    "isolate": llama_cpp.GGML_NUMA_STRATEGY_ISOLATE,
    "numactl": llama_cpp.GGML_NUMA_STRATEGY_NUMACTL,
}
_FILE_TYPES: dict[int, str] = {
    number: name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    for name, number in vars(llama_cpp).items()
    if name.startswith("LLAMA_FTYPE_")
}


def metadata_text(model: Any, key: str) -> str:
    """Return a value of the file's metadata as text; empty if the file has none, or a long one."""
    buffer = ctypes.create_string_buffer(_ROOM)
    length = llama_cpp.llama_model_meta_val_str(model, key.encode(), buffer, _ROOM)
    return buffer.value.decode(errors="replace") if 0 <= length < _ROOM else ""


def all_metadata(model: Any) -> tuple[tuple[str, MetadataValue], ...]:
    """Return the texts, whole numbers and flags of the file's metadata by key.

    Fractions are left out, since llama.cpp rounds them to six decimals.
    """
    found = []
    buffer = ctypes.create_string_buffer(_ROOM)
    for index in range(llama_cpp.llama_model_meta_count(model)):
        length = llama_cpp.llama_model_meta_key_by_index(model, index, buffer, _ROOM)
        key = buffer.value.decode(errors="replace")
        if 0 <= length < _ROOM:
            length = llama_cpp.llama_model_meta_val_str_by_index(model, index, buffer, _ROOM)
            text = buffer.value.decode(errors="replace")
            if 0 <= length < _ROOM and (value := typed(key, text)) is not None:
                found.append((key, value))
    return tuple(sorted(found))


def typed(key: str, text: str) -> MetadataValue | None:
    """Return a value of the type that ``key`` has in GGUF files; None for a fraction, or a number of over 63 bits."""
    if key.startswith("general.") and not _GENERAL_NUMBERS.fullmatch(key):
        # `general.sampling` has numbers of both kinds.
        return None if key.startswith("general.sampling.") else text
    if _NUMBER.fullmatch(text):
        number = int(text)
        return number if -(2**63) <= number < 2**63 else None
    if _FLOAT.fullmatch(text):
        return None
    return _FLAGS.get(text, text)


def _number(text: str) -> float | None:
    """Return a number of the metadata; None if it is none. To six decimals, a sampling parameter is what is meant."""
    try:
        return float(text)
    except ValueError:
        return None


def template_in(path: Path) -> str:
    """Return the template in the file ``path``. Raises StartupError."""
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise StartupError(f"--chat-template-file {path} must have at most {_MAX_BYTES} bytes. Given: {size}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"--chat-template-file {path} cannot be read: {error}") from error
    if not text.strip():
        raise StartupError(f"--chat-template-file {path} is empty")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory, which its holder closes. ``pointer``: a llama_model. ``facts`` has no adapters.

    ``files``: those that were read, as they were before. ``has_head``: it was loaded with the head that drafts.
    ``head_file``: what the draft model is, if that is such a head.
    """

    pointer: Any
    vocabulary: LlamaVocabulary
    facts: ModelFile
    files: SeenFiles
    has_head: bool
    head_file: HeadFile | None

    @property
    def only_embeds(self) -> bool:
        """Whether the model can embed texts and do nothing else."""
        return is_encoder(self.facts.architecture)

    def close(self) -> None:
        """Free the model, whose contexts must be free, once nobody uses it."""
        self.vocabulary.users.end()
        llama_cpp.llama_model_free(self.pointer)


def open_model(config: ShardConfig, devices: Sequence[Device] | None = None, *, is_head: bool = False) -> LoadedModel:
    """Load the model that ``config`` names; raises StartupError, also if another file that it names cannot be read.

    ``devices``: those that there are; looked for if None. ``is_head``: it is the file of a head that was checked.
    """
    _check_files(config)
    config = _of_first_part(config)
    path = Path(config.model)
    files = _seen_files(config)
    _log.info("loading %s", path.name, extra={"mib": path.stat().st_size >> 20})
    route_llama_log()
    devices = first_devices(config.rpc_servers) if devices is None else devices
    check_kernels()
    has_head, file = wants_head(config), head_file(config)
    pointer = _load(config, ModelPlacement(config, devices), has_head=has_head)
    try:
        _check_kind(path, pointer, is_head=is_head)
        _warn_of_pre_tokenizer(path, pointer)
        vocab = llama_cpp.llama_model_get_vocab(pointer)
        vocabulary = LlamaVocabulary(vocab, llama_cpp.llama_model_chat_template(pointer, b"rerank") or b"")
        facts = _model_facts(path, pointer, vocab, vocabulary, uses_gpus=config.uses_gpus)
        facts = replace(
            facts,
            fingerprint=fingerprint([file.path for file in files.model]),
            request_defaults=config.request_defaults(lambda key: _number(metadata_text(pointer, key))),
        )
        if config.chat_template_file:
            facts = replace(facts, chat_template=template_in(Path(config.chat_template_file)), tool_template="")
    except BaseException:
        llama_cpp.llama_model_free(pointer)
        raise
    return LoadedModel(
        pointer=pointer, vocabulary=vocabulary, facts=facts, files=files, has_head=has_head, head_file=file
    )


@contextlib.contextmanager
def measured_model(config: ShardConfig, devices: Sequence[Device], *, is_head: bool = False) -> Iterator[Any]:
    """Yield a llama_model without weights, whose contexts have no memory either: it tells what both would take.

    llama.cpp must be initialized. Raises StartupError as `open_model` does.
    """
    _check_files(config)
    config = _of_first_part(config)
    route_llama_log()
    parameters = llama_cpp.llama_model_default_params()
    placement = ModelPlacement(config, devices)
    placement.apply(parameters)
    parameters.use_extra_bufts = not config.exact
    parameters.load_mtp = wants_head(config)
    parameters.no_alloc = True
    # Like llama-server, since there is nothing to map.
    parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    path = Path(config.model)
    model = _loaded(path, parameters)
    try:
        _check_kind(path, model, is_head=is_head)
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def only_embeds(model: Any) -> bool:
    """Whether a llama_model can embed texts and do nothing else."""
    return is_encoder(metadata_text(model, "general.architecture"))


def _check_files(config: ShardConfig) -> None:
    """Raise StartupError if a file that ``config`` names cannot be read."""
    _check_gguf_file(Path(config.model), "model", "-m")
    _check_parts(Path(config.model))
    for adapter in config.adapters:
        _check_gguf_file(adapter.path, "adapter", "--lora")
    if config.model_draft:
        _check_gguf_file(Path(config.model_draft), "draft model", "-md")
    if config.mmproj:
        _check_gguf_file(Path(config.mmproj), "projector", "--mmproj")


def _check_parts(path: Path) -> None:
    """Raise StartupError if a model in several files lacks one."""
    missing = [name for name in part_names(path.name) if not path.with_name(name).is_file()]
    try:
        # A file may also have such a name without being a part.
        if missing and (read_header(path).number("split.count") or 0) > 1:
            raise StartupError(
                f"{path} is a part of a model, and {path.parent} lacks {missing[0]}: put all parts into one folder"
            )
    except (OSError, FetchError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error


def _of_first_part(config: ShardConfig) -> ShardConfig:
    """Return flags that name the first part of the model, from which llama.cpp loads the others."""
    return replace(config, model=str(parts_of(Path(config.model))[0]))


def _seen_files(config: ShardConfig) -> SeenFiles:
    """Return the files that decide what cells mean, as they are now. Raises StartupError.

    A draft model is not among them: it has cells of its own, which nobody saves.
    """
    projector = find_projector(config)
    try:
        return SeenFiles(
            model=tuple(map(SeenFile.at, parts_of(Path(config.model)))),
            adapters=tuple(SeenFile.at(adapter.path) for adapter in config.adapters),
            projector=None if projector is None else SeenFile.at(projector),
        )
    except OSError as error:
        raise StartupError(f"cannot read {error.filename}: {error.strerror}") from error


def _check_gguf_file(path: Path, kind: str, flag: str) -> None:
    """Raise StartupError if the file cannot be read or is no GGUF; ``kind`` and ``flag`` go into the message."""
    try:
        if path.exists() and not path.is_file():
            # To open a pipe would wait for a writer.
            raise StartupError(f"{path} is no file; pass {flag} the path of a GGUF file")
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise StartupError(
            f"cannot read the {kind} {path}: {error.strerror}; pass {flag} the path of a GGUF file"
        ) from error
    if magic != _MAGIC:
        raise StartupError(f"{path} is no GGUF file; pass {flag} the path of one")


def _load(config: ShardConfig, placement: ModelPlacement, *, has_head: bool) -> Any:
    """Load the model, log progress and return a llama_model pointer; raises StartupError."""
    logged_s = monotonic()

    def on_progress(progress: float, _user_data: Any) -> bool:
        nonlocal logged_s
        if monotonic() - logged_s >= _PROGRESS_S:
            logged_s = monotonic()
            _log.info("loading", extra={"percent": int(progress * 100)})
        return True

    callback = llama_cpp.llama_progress_callback(on_progress)
    parameters = llama_cpp.llama_model_default_params()
    placement.apply(parameters)
    # Not with --exact: llama.cpp changes the order of weights for kernels that compute some rows together.
    parameters.use_extra_bufts = not config.exact
    parameters.load_mode = _LOAD_MODES[config.mmap, config.mlock]
    parameters.load_mtp = has_head
    parameters.progress_callback = callback
    if config.numa != "off":
        # Once for the process: llama.cpp ignores what comes later.
        llama_cpp.llama_numa_init(_NUMA_STRATEGIES[config.numa])
    locked = locked_memory()
    model = _loaded(Path(config.model), parameters)
    if config.mlock:
        _warn_of_unlocked(model, locked_memory() - locked, has_devices=config.uses_gpus)
    return model


def _warn_of_unlocked(model: Any, locked_bytes: int, *, has_devices: bool) -> None:
    """Log a warning if the host refused to lock the weights. On devices, nobody says how many of them the host has."""
    wanted = 1 if has_devices else int(llama_cpp.llama_model_size(model))
    if locked_bytes < wanted:
        _log.warning(
            "--mlock is not kept: the host allows this process too little locked memory; raise its limit, as with "
            "ulimit -l, LimitMEMLOCK= or docker run --ulimit memlock",
            extra={"mib_locked": locked_bytes >> 20, "mib_wanted": wanted >> 20},
        )


def _loaded(path: Path, parameters: Any) -> Any:
    """Return a llama_model pointer; raises StartupError."""
    take_reason()
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        reason = take_reason()
        said = f": {reason}" if reason else "; see --log-level debug"
        raise StartupError(f"llama.cpp cannot load {path}: it is damaged, too new, or memory is short{said}")
    return model


def _check_kind(path: Path, model: Any, *, is_head: bool) -> None:
    """Raise StartupError if this kind of model cannot be served, nor be used as ``is_head`` says."""
    if llama_cpp.llama_model_is_diffusion(model):
        raise StartupError(f"{path} is a diffusion model: only autoregressive models can be served")
    if llama_cpp.llama_model_has_encoder(model) and not is_head:
        raise StartupError(
            f"{path} has an encoder as T5 has: only decoder models, and BERT and its like, can be served"
        )
    _check_tokenizer(path, llama_cpp.llama_model_get_vocab(model))


def _check_tokenizer(path: Path, vocab: Any) -> None:
    """Raise StartupError if llama.cpp could not tokenize: it would end the process at the first text."""
    kind = llama_cpp.llama_vocab_type(vocab)
    if kind == llama_cpp.LLAMA_VOCAB_TYPE_NONE:
        raise StartupError(f"{path} has no tokenizer: only models of texts can be served")
    of_bert = kind == llama_cpp.LLAMA_VOCAB_TYPE_WPM
    checks = kind in _ADD_TOKENS
    for name, is_added, token in (
        (
            "begin (bos)",
            of_bert or (checks and llama_cpp.llama_vocab_get_add_bos(vocab)),
            llama_cpp.llama_vocab_bos(vocab),
        ),
        ("end (eos)", checks and llama_cpp.llama_vocab_get_add_eos(vocab), llama_cpp.llama_vocab_eos(vocab)),
        ("separator (sep)", of_bert, llama_cpp.llama_vocab_sep(vocab)),
    ):
        if is_added and token < 0:
            raise StartupError(f"the tokenizer of {path} needs the {name} token, which the file does not name")


def _warn_of_pre_tokenizer(path: Path, model: Any) -> None:
    """Log a warning if the file does not say how texts are split before they are tokenized, which llama.cpp guesses."""
    is_split = llama_cpp.llama_vocab_type(llama_cpp.llama_model_get_vocab(model)) == llama_cpp.LLAMA_VOCAB_TYPE_BPE
    if is_split and not metadata_text(model, "tokenizer.ggml.pre"):
        _log.warning(
            "%s does not name its pre-tokenizer (tokenizer.ggml.pre): texts may be tokenized wrongly, and outputs much "
            "worse; convert the model again",
            path.name,
        )


def _model_facts(path: Path, model: Any, vocab: Any, vocabulary: LlamaVocabulary, *, uses_gpus: bool) -> ModelFile:
    """Read the facts of a loaded model, without its adapters and its fingerprint."""
    template = llama_cpp.llama_model_chat_template(model, None)
    return ModelFile(
        name=path.name,
        fingerprint="",
        vocabulary_size=vocabulary.size,
        vocabulary_fingerprint=vocabulary.fingerprint(),
        trained_context=int(llama_cpp.llama_model_n_ctx_train(model)),
        chat_template=template.decode(errors="replace") if template else "",
        bos_text=vocabulary.text(llama_cpp.llama_vocab_bos(vocab)),
        eos_text=vocabulary.text(llama_cpp.llama_vocab_eos(vocab)),
        eos_token_ids=vocabulary.eog_ids,
        architecture=metadata_text(model, "general.architecture"),
        parameter_count=int(llama_cpp.llama_model_n_params(model)),
        weight_bytes=int(llama_cpp.llama_model_size(model)),
        quantization=_quantization(model),
        modified_s=int(path.stat().st_mtime),
        # llama.cpp does not say how much of a model it put into the memory of a GPU.
        device_bytes=None if llama_cpp.llama_supports_gpu_offload() and uses_gpus else 0,
        metadata=all_metadata(model),
        fill=vocabulary.fill_tokens(),
    )


def _quantization(model: Any) -> str:
    """Return the name of the type of most weights as llama.cpp's tools take it, such as "Q4_K_M"."""
    if not metadata_text(model, "general.file_type"):
        return ""
    return _FILE_TYPES.get(llama_cpp.llama_model_ftype(model), "")
