"""The file of the names that operators gave models, beside the models of the hub's cache.

Servers that share a cache share it: each change reads what is there, and puts a whole new file into its place.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from caravan_dialects.api.ollama.recipe import recipe_of
from caravan_scheduler.core.library import LibraryFaultError, MadeModel
from caravan_serve.library.catalogue import CatalogueError, check_name

_NAME = "caravan-models.json"


class _Made(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    base: str
    recipe: dict[str, object]
    made_s: float


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: list[_Made]


class MadeFile:
    """Keeps models that were made of others. All calls block."""

    def __init__(self, folder: Path) -> None:
        """``folder``: that of the hub's cache, which may not exist yet."""
        self._path = folder / _NAME

    def read(self) -> dict[str, MadeModel]:
        """Return the models by name. Raises CatalogueError, which names the file and the problem."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_File).models
            for made in found:
                check_name("name", made.name)
                recipe_of(made.recipe)
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CatalogueError(f"{self._path}: {error.strerror}") from error
        except (msgspec.DecodeError, CatalogueError) as error:
            raise CatalogueError(f"{self._path}: {error}") from error
        return {one.name: MadeModel(one.name, one.base, one.recipe, one.made_s) for one in found}

    def put(self, made: MadeModel) -> dict[str, MadeModel]:
        """Add a model, in place of one with its name; return all. Raises LibraryError."""
        with self._changing() as models:
            models[made.name] = made
        return models

    def remove(self, name: str) -> dict[str, MadeModel]:
        """Remove a model, if it is there; return all others. Raises LibraryError."""
        with self._changing() as models:
            models.pop(name, None)
        return models

    @contextlib.contextmanager
    def _changing(self) -> Iterator[dict[str, MadeModel]]:
        """Yield the models, and write them as the block leaves them. Others that want to change them wait."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                models = self.read()
                yield models
                self._write(models)
        except (OSError, CatalogueError) as error:
            raise LibraryFaultError(f"the file {_NAME} beside the models cannot be changed") from error

    def _write(self, models: Mapping[str, MadeModel]) -> None:
        file = _File(
            models=[
                _Made(name=made.name, base=made.base, recipe=dict(made.recipe), made_s=made.made_s)
                for made in models.values()
            ]
        )
        beside = self._path.with_suffix(f".{os.getpid()}.new")
        with beside.open("wb") as target:
            target.write(msgspec.json.format(msgspec.json.encode(file), indent=2))
            target.flush()
            os.fsync(target.fileno())
        beside.rename(self._path)
