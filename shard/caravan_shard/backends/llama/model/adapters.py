"""The LoRA adapters of a model, and the one that its context applies."""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import llama_cpp

from caravan_shard.adapter_file import AdapterFile
from caravan_shard.startup_error import StartupError


class LlamaAdapters:
    """The loaded adapters. They are freed with the model.

    A context plans the largest compute graph anew whenever another adapter is applied, so some may be loaded later.
    """

    def __init__(self, model: Any, files: Sequence[AdapterFile]) -> None:
        """Load ``files``; raises StartupError."""
        self._model = model
        self._loaded = {file.name: (_load(model, file), file.scale) for file in files}
        self._applied = ""
        # The one that it is applied to.
        self._context: Any = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order in which they were loaded."""
        return tuple(self._loaded)

    def load(self, key: str, file: AdapterFile) -> str:
        """Load another one under ``key``. Return why it cannot be used, "" if it can."""
        try:
            self._loaded[key] = _load(self._model, file), file.scale
        except StartupError as error:
            return str(error)
        return ""

    def unload(self, key: str) -> None:
        """Free one, of which the context keeps no pointer then."""
        if self._applied == key:
            self.apply(self._context, "")
        adapter, _scale = self._loaded.pop(key)
        llama_cpp.llama_adapter_lora_free(adapter)

    def forget_context(self) -> None:
        """Note that the next context has no adapter applied."""
        self._applied = ""

    def apply(self, context: Any, name: str) -> None:
        """Apply an adapter from the next forward pass on; empty for none. A change makes it plan its memory anew."""
        if name == self._applied:
            return
        self._context = context
        if name:
            adapter, scale = self._loaded[name]
            pointers = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
            llama_cpp.llama_set_adapters_lora(context, pointers, 1, (ctypes.c_float * 1)(scale))
        else:
            llama_cpp.llama_set_adapters_lora(context, None, 0, None)
        self._applied = name


def _load(model: Any, file: AdapterFile) -> Any:
    adapter = llama_cpp.llama_adapter_lora_init(model, os.fsencode(file.path))
    if not adapter:
        raise StartupError(
            f"llama.cpp cannot use {file.path} as adapter {file.name!r}: it is no LoRA adapter, was made for another "
            "model, or is damaged; llama.cpp's own line is in the log"
        )
    if llama_cpp.llama_adapter_get_alora_n_invocation_tokens(adapter) > 0:
        llama_cpp.llama_adapter_lora_free(adapter)
        raise StartupError(
            f"adapter {file.name!r} applies only from certain tokens on (an activated LoRA): that is not supported"
        )
    return adapter
