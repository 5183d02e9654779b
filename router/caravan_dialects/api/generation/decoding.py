"""Decodes the pictures and sounds of one client, and counts them."""

import time
from dataclasses import dataclass
from typing import Protocol

from caravan_dialects.media.decoder import MediaDecoder
from caravan_dialects.media.file import MediaFile, MediaFileError
from caravan_scheduler.core.media import Media, Picture
from caravan_scheduler.core.request_metrics import RequestMetrics


class Decoding(Protocol):
    """Makes media of files."""

    async def decode(self, file: MediaFile) -> Media:
        """Return the picture or the sound that ``file`` has. Raises MediaFileError."""
        ...


@dataclass(frozen=True, slots=True)
class CountedDecoding:
    """Decodes for requests of one model and one ``owner``, the name of an API key."""

    decoder: MediaDecoder
    metrics: RequestMetrics
    owner: str

    async def decode(self, file: MediaFile) -> Media:
        """Return the picture or the sound that ``file`` has. Raises MediaFileError."""
        began = time.monotonic()
        try:
            medium = await self.decoder.decode(file, self.owner)
        except MediaFileError as error:
            self.metrics.media_refused(error.reason.value)
            raise
        kind = "picture" if isinstance(medium, Picture) else "sound"
        self.metrics.media_decoded(kind, time.monotonic() - began)
        return medium
