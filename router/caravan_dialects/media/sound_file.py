"""Decodes a sound with miniaudio, as llama.cpp does. Only the decoding process imports this module."""

import io
import math
from collections.abc import Iterable

import miniaudio

from caravan_dialects.media.kinds import SOUNDS, format_of
from caravan_dialects.media.limits import MAX_SAMPLE, MAX_SOUND_BYTES, MAX_SOUND_S, MIN_SOUND_S
from caravan_dialects.media.problems import MediaFileError, Reason
from caravan_proto.limits import MAX_MEDIA_BYTES
from caravan_scheduler.core.media import SAMPLE_BYTES

_FORMATS = {
    "WAV": miniaudio.FileFormat.WAV,
    "MP3": miniaudio.FileFormat.MP3,
    "FLAC": miniaudio.FileFormat.FLAC,
}
_FRAMES = 16384


class _Bytes(miniaudio.StreamableSource):  # type: ignore[misc]
    """A file in memory. miniaudio's own decoder of memory would try all formats."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def read(self, num_bytes: int) -> bytes:
        return self._file.read(num_bytes)

    def seek(self, offset: int, origin: miniaudio.SeekOrigin) -> bool:
        self._file.seek(offset, io.SEEK_SET if origin is miniaudio.SeekOrigin.START else io.SEEK_CUR)
        return True


def decode_sound(data: bytes, sample_rate: int) -> bytes:
    """Return the samples of one channel at ``sample_rate``. Raises MediaFileError, MemoryError, MiniaudioError."""
    if len(data) > MAX_SOUND_BYTES:
        raise MediaFileError(Reason.SIZE, f"must have at most {MAX_SOUND_BYTES} bytes. Given: {len(data)}")
    known = format_of(data)
    if known not in SOUNDS:
        raise MediaFileError(Reason.FORMAT, "must be a WAV, MP3 or FLAC file")
    stream = miniaudio.stream_any(
        _Bytes(data),
        _FORMATS[known],
        miniaudio.SampleFormat.FLOAT32,
        nchannels=1,
        sample_rate=sample_rate,
        frames_to_read=_FRAMES,
    )
    return _bounded(stream, sample_rate)


def _bounded(stream: Iterable["miniaudio.array.array[float]"], sample_rate: int) -> bytes:
    samples = bytearray()
    # Shards take no larger media.
    limit_s = min(MAX_SOUND_S, MAX_MEDIA_BYTES // (SAMPLE_BYTES * sample_rate))
    for chunk in stream:
        # A file may have samples that are no numbers. They would make every token after them one.
        if not (math.isfinite(sum(chunk)) and min(chunk) >= -MAX_SAMPLE and max(chunk) <= MAX_SAMPLE):
            raise MediaFileError(Reason.BROKEN, f"has samples that are not between -{MAX_SAMPLE:g} and {MAX_SAMPLE:g}")
        samples += chunk.tobytes()
        if len(samples) > limit_s * sample_rate * SAMPLE_BYTES:
            raise MediaFileError(Reason.SIZE, f"must last at most {limit_s} seconds")
    seconds = len(samples) / (SAMPLE_BYTES * sample_rate)
    if seconds < MIN_SOUND_S:
        raise MediaFileError(Reason.SIZE, f"must last at least {MIN_SOUND_S} seconds. Given: {seconds:.3f}")
    return bytes(samples)
