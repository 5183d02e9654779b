"""Media when a recording is played again: ids without content."""

from collections.abc import Iterable

from caravan_scheduler.core.media import Media, Picture

_ID_BYTES = 8


def media_id_of(number: int) -> bytes:
    """Return the id of the medium, or the fingerprint of the encoder, that has this number in a recording."""
    return number.to_bytes(_ID_BYTES, "big") if number else b""


def media_number_of(media_id: bytes) -> int:
    """Return the number for which `media_id_of` returns ``media_id``."""
    return int.from_bytes(media_id, "big")


def contents_of(numbers: Iterable[int]) -> dict[bytes, Media]:
    """Return media of these numbers by their ids."""
    return {(media_id := media_id_of(number)): Picture(media_id, 0, 0, b"") for number in numbers}
