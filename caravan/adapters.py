"""Adapters that a program loads and unloads while its model is open."""

from collections.abc import Callable
from pathlib import Path

from caravan.errors import RequestError
from caravan.local_engine import LocalEngine
from caravan.valid_requests import named_errors
from caravan_proto.messages.adapters import AdapterSource

# What clients and operators are told, by what `LLM.load_adapter` and the options of a model call it. Paths stay.
_NAMES = {
    "lora_name": "name",
    "lora_path": "path",
    "load_inplace is set": "replace=True is given",
    " in the folder of --lora-dir": "",
    "--max-loras": "max_loras",
}


class LocalAdapters:
    """Those of a model in this process. Use it on the model's event loop. Every call raises ClosedError."""

    def __init__(self, use: Callable[[], LocalEngine]) -> None:
        """``use`` returns the model's engine, or raises ClosedError."""
        self._use = use

    async def load(self, name: str, path: str | Path, scale: float, *, replace: bool) -> None:
        """Load an adapter for calls that name it. Raises RequestError."""
        engine, source = self._use(), _source(name, path, scale)
        with named_errors(), engine.shard.calls.adapters.allowing(source.path):
            problem = await engine.fleet.adapters.load("", source, replaces=replace)
        if problem:
            # What was given is quoted as it is.
            told, given, value = problem.partition(" Given: ")
            for theirs, ours in _NAMES.items():
                told = told.replace(theirs, ours)
            raise RequestError(f"{told}{given}{value}")

    async def unload(self, name: str) -> None:
        """Let no more calls name an adapter. Raises RequestError."""
        engine = self._use()
        _check_name(name)
        if not engine.fleet.adapters.unload(name):
            raise RequestError(f"no adapter that `load_adapter` has loaded has this name. Given: {name!r:.80}")

    async def names(self) -> list[str]:
        """Return the names that calls may use."""
        engine = self._use().fleet.engine("")
        return [] if engine is None else [*engine.model.adapters]


def _source(name: str, path: str | Path, scale: float) -> AdapterSource:
    """Return the adapter that a program means. ``path`` is taken from the working directory. Raises RequestError."""
    _check_name(name)
    if not isinstance(path, str | Path):
        raise RequestError(f"path must be a str or a Path. Given: {path!r:.80}")
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise RequestError(f"scale must be a number. Given: {scale!r:.80}")
    return AdapterSource(name=name, path=str(Path(path).absolute()), scale=float(scale))


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise RequestError(f"name must be a str. Given: {name!r:.80}")
