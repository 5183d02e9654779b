"""Loads a GGUF file and reads its facts."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import llama_cpp

from caravan_shard.backends.base import ModelFacts, StartupError
from caravan_shard.backends.llama.devices import ModelPlacement
from caravan_shard.backends.llama.metadata import all_metadata, metadata_text
from caravan_shard.backends.llama.vocabulary import LlamaVocabulary

_log = logging.getLogger(__name__)

_MAGIC = b"GGUF"
_HEADER_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 16
_BLOCKS = 16
_FILE_TYPES: dict[int, str] = {
    number: name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
    for name, number in vars(llama_cpp).items()
    if name.startswith("LLAMA_FTYPE_")
}


def check_gguf_file(path: Path, kind: str, flag: str) -> None:
    """Raise StartupError if the file cannot be read or is no GGUF; ``kind`` and ``flag`` go into the message."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise StartupError(
            f"cannot read the {kind} {path}: {error.strerror}; pass {flag} the path of a GGUF file"
        ) from error
    if magic != _MAGIC:
        raise StartupError(f"{path} is no GGUF file; pass {flag} the path of one")


def load_model(path: Path, placement: ModelPlacement) -> Any:
    """Load the model, log progress and return a llama_model pointer; raises StartupError."""
    logged = -1

    def on_progress(progress: float, _user_data: Any) -> bool:
        nonlocal logged
        percent = int(progress * 4) * 25
        if percent > logged:
            logged = percent
            _log.info("loading", extra={"percent": percent})
        return True

    callback = llama_cpp.llama_progress_callback(on_progress)
    parameters = llama_cpp.llama_model_default_params()
    placement.apply(parameters)
    parameters.progress_callback = callback
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), parameters)
    if not model:
        raise StartupError(
            f"llama.cpp cannot load {path}: it is damaged, too new, or memory is short; see --log-level debug"
        )
    if llama_cpp.llama_model_has_encoder(model) or not llama_cpp.llama_model_has_decoder(model):
        raise StartupError(f"{path} is no text generation model: only decoder models can be served")
    if llama_cpp.llama_model_is_diffusion(model):
        raise StartupError(f"{path} is a diffusion model: only autoregressive models can be served")
    return model


def model_facts(path: Path, model: Any, vocab: Any, vocabulary: LlamaVocabulary, *, uses_gpus: bool) -> ModelFacts:
    """Read the facts of a loaded model, without its adapters."""
    template = llama_cpp.llama_model_chat_template(model, None)
    return ModelFacts(
        name=path.name,
        fingerprint=fingerprint(path),
        vocabulary_size=vocabulary.size,
        trained_context=int(llama_cpp.llama_model_n_ctx_train(model)),
        chat_template=template.decode(errors="replace") if template else "",
        bos_text=vocabulary.text(llama_cpp.llama_vocab_bos(vocab)),
        eos_text=vocabulary.text(llama_cpp.llama_vocab_eos(vocab)),
        eog_ids=vocabulary.eog_ids,
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


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of the file's size, its first MiB and 16 of its blocks: equal for copies of one file."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        digest.update(file.read(_HEADER_BYTES))
        for block in range(1, _BLOCKS + 1):
            file.seek(max(0, size * block // _BLOCKS - _BLOCK_BYTES))
            digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
