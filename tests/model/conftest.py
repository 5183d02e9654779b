"""What holds for all tests with a model in their own process."""

import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from caravan_shard.backends.llama.backend import LlamaCppBackend
from caravan_shard.backends.llama.kernels.row_by_row import ROW_BY_ROW
from caravan_shard.engine.engine import Engine


class OpenModels:
    """The backends that are open, and the engines that close them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.backends: set[LlamaCppBackend] = set()
        self._engines: weakref.WeakKeyDictionary[LlamaCppBackend, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
        open_backend, close_backend, open_engine = LlamaCppBackend.__init__, LlamaCppBackend.close, Engine.__init__

        def opened(backend: LlamaCppBackend, *arguments: Any, **named: Any) -> None:
            open_backend(backend, *arguments, **named)
            if not named.get("drafts"):  # another one closes its draft model
                self.backends.add(backend)

        def closed(backend: LlamaCppBackend) -> None:
            self.backends.discard(backend)
            close_backend(backend)

        def engine_opened(engine: Engine, backend: Any, *arguments: Any, **named: Any) -> None:
            open_engine(engine, backend, *arguments, **named)
            if isinstance(backend, LlamaCppBackend):
                self._engines[backend] = weakref.ref(engine)

        patch.setattr(LlamaCppBackend, "__init__", opened)
        patch.setattr(LlamaCppBackend, "close", closed)
        patch.setattr(Engine, "__init__", engine_opened)

    def close_all_but(self, kept: set[LlamaCppBackend]) -> int:
        """Close the other ones, and return how many those were."""
        left = self.backends - kept
        for backend in left:
            engine = self._engines[backend]() if backend in self._engines else None
            (backend if engine is None else engine).close()
        return len(left)


@pytest.fixture(scope="session")
def open_models() -> Iterator[OpenModels]:
    with pytest.MonkeyPatch.context() as patch:
        yield OpenModels(patch)


@pytest.fixture(scope="module", autouse=True)
def closed_models(request: pytest.FixtureRequest, open_models: OpenModels) -> Iterator[None]:
    """Close what a file leaves open: beside a model that stays open, no test of another file may have --exact.

    A file closes its models itself, unless one of its tests fails before it does.
    """
    failed = request.session.testsfailed
    yield
    left = open_models.close_all_but(set())
    assert request.session.testsfailed > failed or (left, ROW_BY_ROW._open) == (0, 0), "models are left open"


@pytest.fixture(autouse=True)
def closed_models_of_the_test(request: pytest.FixtureRequest, open_models: OpenModels) -> Iterator[None]:
    """Close what a test leaves open, except what fixtures of its file keep open for the next one."""
    failed, kept = request.session.testsfailed, set(open_models.backends)
    yield
    left = open_models.close_all_but(kept)
    assert request.session.testsfailed > failed or left == 0, "models are left open"
