"""What operators add to the library and remove from it."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator

from caravan_models.reference import hub_model
from caravan_router.core.library import LibraryError, PullProgress
from caravan_router.scheduling.residency.model_need import Phase
from caravan_router.serve.library.hub import pulled, reference_of, removed
from caravan_router.serve.library.shelf import Shelf
from caravan_router.serve.library.slot import Trouble

_POLL_S = 0.05


class ModelStock:
    """Downloads and deletes models of the hub's cache."""

    def __init__(self, shelf: Shelf, *, has_hub: bool) -> None:
        """``has_hub``: whether operators may change anything."""
        self._shelf = shelf
        self._has_hub = has_hub

    async def pull(self, name: str) -> AsyncGenerator[PullProgress, None]:
        """See `Stock`."""
        self._check_hub()
        reference = reference_of(name)
        with self._shelf.downloads.of(hub_model(reference).name) as note:
            async with contextlib.aclosing(pulled(reference)) as steps:
                async for step in steps:
                    if isinstance(step, PullProgress):
                        note(step.model)
                        yield step
                    else:
                        self._shelf.add(step)

    async def remove(self, name: str) -> None:
        """See `Stock`."""
        self._check_hub()
        slot = self._shelf.slot(name)
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

    def _check_hub(self) -> None:
        if not self._has_hub:
            raise LibraryError("this server downloads and deletes no models: it was started without --models-hub")
