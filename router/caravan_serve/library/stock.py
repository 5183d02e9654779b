"""What operators add to the library and remove from it."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator
from dataclasses import replace

from caravan_models.known import known_model
from caravan_models.reference import hub_model
from caravan_scheduler.core.library import LibraryError, MadeModel, PullProgress
from caravan_scheduler.residency import Phase
from caravan_serve.library.catalogue import CatalogueError, check_name
from caravan_serve.library.hub import pulled, reference_of, removed
from caravan_serve.library.made_file import MadeFile
from caravan_serve.library.shelf import Shelf
from caravan_serve.library.slot import Trouble

_POLL_S = 0.05


class ModelStock:
    """Downloads and deletes models of the hub's cache, and makes models of others."""

    def __init__(self, shelf: Shelf, made_file: MadeFile | None) -> None:
        """``made_file``: None if nothing may be changed."""
        self._shelf = shelf
        self._made_file = made_file

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """See `Stock`."""
        self._changeable()
        reference = reference_of(name)
        with self._shelf.downloads.of(hub_model(reference).name) as note:
            async with contextlib.aclosing(pulled(reference)) as steps:
                async for step in steps:
                    if isinstance(step, PullProgress):
                        note(step.model)
                        yield step
                    else:
                        self._shelf.add(step)

    async def make(self, made: MadeModel) -> AsyncGenerator[PullProgress, None]:
        """See `Stock`."""
        made_file = self._changeable()
        try:
            check_name("the name", made.name)
        except CatalogueError as error:
            raise LibraryError(str(error)) from None
        if made.name in self._shelf.own_names:
            raise LibraryError(f"{made.name} is the name of a model that was not made of another one")
        if self._shelf.find(made.base) is None:
            if known_model(made.base) is None:
                raise LibraryError(f"there is no model {made.base!r}: pull it first")
            async with contextlib.aclosing(self.pull(made.base)) as steps:
                async for step in steps:
                    yield step
        base = self._shelf.slot(made.base).entry.name
        self._shelf.set_made(await asyncio.to_thread(made_file.put, replace(made, base=base)))

    async def remove(self, name: str) -> None:
        """See `Stock`."""
        made_file = self._changeable()
        if name in self._shelf.made:
            self._shelf.set_made(await asyncio.to_thread(made_file.remove, name))
            return
        slot = self._shelf.slot(name)
        if names := self._shelf.made_of(slot):
            raise LibraryError(f"{', '.join(names)} was made of {slot.entry.name}: delete that first")
        if not slot.entry.is_pulled:
            raise LibraryError(f"{name} is of --models-dir or --models-file, which this leaves alone")
        # Nobody waits for it any more, so that it is not loaded again.
        gone = f"The model {slot.entry.name} was deleted"
        slot.trouble = Trouble(problem="it is being deleted", told=gone, until_s=math.inf)
        self._shelf.note_absence(slot)
        while slot.phase is not Phase.COLD or slot.work is not None:
            slot.wishes.is_asked_to_leave = True
            await asyncio.sleep(_POLL_S)
        self._shelf.take(slot)
        try:
            await removed(slot.entry)
        except LibraryError:
            slot.trouble = Trouble()
            self._shelf.put(slot)
            raise
        await self._shelf.until_forgotten(slot.entry.name, _POLL_S)

    def _changeable(self) -> MadeFile:
        if self._made_file is None:
            raise LibraryError("this server's models stay as they are: it was started without --models-hub")
        return self._made_file
