"""Decodes the files of pictures, sounds and embeddings, in processes that may die or hang at any time."""

import asyncio
import hashlib
from collections import OrderedDict

import msgspec

from caravan_dialects.guarded_process import Ended, GuardedProcesses, ProcessEndedError, Worker
from caravan_dialects.media.file import (
    REMEMBERED_BYTES,
    TIME_LIMIT_S,
    DecodeReply,
    DecodeRequest,
    MediaFile,
    MediaFileError,
    Reason,
)
from caravan_scheduler.core.errors import HelperError
from caravan_scheduler.core.media import SAMPLE_BYTES, Embeddings, Media, Picture, Sound

# With two, a file that uses up its time does not stop all others.
_PROCESSES = 2
_DECODER = msgspec.msgpack.Decoder(DecodeReply)


class DecodedFiles:
    """The media of the files that were used last, up to ``max_bytes`` of them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._media: OrderedDict[bytes, Media] = OrderedDict()

    def find(self, key: bytes) -> Media | None:
        """Return the medium of the file that has this key."""
        if key in self._media:
            self._media.move_to_end(key)
        return self._media.get(key)

    def add(self, key: bytes, medium: Media) -> None:
        """Remember ``medium``, and forget others for it."""
        if key in self._media:
            return
        self._media[key] = medium
        self._bytes += medium.size_bytes
        while self._bytes > self._max_bytes:
            _, oldest = self._media.popitem(last=False)
            self._bytes -= oldest.size_bytes


def key_of(file: MediaFile, owner: str) -> bytes:
    """Return a digest of ``file``. Each owner has keys of its own: none can find out what others have sent."""
    digest = hashlib.sha256(f"{owner}\0{file.sample_rate}\0{file.row_size}\0{isinstance(file.data, str)}\0".encode())
    digest.update(file.data.encode("utf-8", "surrogatepass") if isinstance(file.data, str) else file.data)
    return digest.digest()


class MediaDecoder:
    """Decodes with a few processes, which it starts when they are first needed and keeps until ``close``."""

    def __init__(
        self, time_limit_s: float = TIME_LIMIT_S, grace_s: float = 5.0, remembered_bytes: int = REMEMBERED_BYTES
    ) -> None:
        self._time_limit_s = time_limit_s
        self._decoded = DecodedFiles(remembered_bytes)
        self.processes = GuardedProcesses(
            Worker(
                module="caravan_dialects.media.decoder_process",
                processes=_PROCESSES,
                time_limit_s=time_limit_s,
                grace_s=grace_s,
            )
        )

    async def decode(self, file: MediaFile, owner: str = "") -> Media:
        """Return what ``file`` has; ``owner`` sent it. Raises MediaFileError, HelperError."""
        _check_bytes(file)
        key = await asyncio.to_thread(key_of, file, owner)
        medium = self._decoded.find(key)
        if medium is None:
            medium = await self._decode(file)
            self._decoded.add(key, medium)
        return medium

    async def _decode(self, file: MediaFile) -> Media:
        try:
            reply = _DECODER.decode(await self.processes.ask(_request(file)))
        except ProcessEndedError as error:
            raise self._failure(error) from None
        if reply.reason:
            raise MediaFileError(Reason(reply.reason), reply.problem)
        # The digest of many megabytes, in a thread of its own, by this process: the other one has read the file.
        if file.sample_rate:
            return await asyncio.to_thread(Sound.of, file.sample_rate, reply.content)
        if file.row_size:
            count = len(reply.content) // (SAMPLE_BYTES * file.row_size)
            return await asyncio.to_thread(Embeddings.of_bytes, count, file.row_size, reply.content)
        return await asyncio.to_thread(Picture.of, reply.width, reply.height, reply.content)

    async def close(self) -> None:
        """End all processes. Call this when nothing is being decoded any more."""
        await self.processes.close()

    def _failure(self, error: ProcessEndedError) -> MediaFileError | HelperError:
        if not error.blames_request:
            return HelperError(f"Files cannot be decoded at present: {error}")
        if error.how is Ended.TIME:
            return MediaFileError(Reason.TIME, f"takes more than {self._time_limit_s:g} s to decode")
        return MediaFileError(Reason.DECODER, "cannot be decoded: two processes that tried it ended")


def _check_bytes(file: MediaFile) -> None:
    if file.size_bytes > file.most_bytes:
        raise MediaFileError(Reason.SIZE, f"must have at most {file.most_bytes} bytes. Given: {file.size_bytes}")


def _request(file: MediaFile) -> bytes:
    data = file.data
    if isinstance(data, str) and not data.isascii():
        raise MediaFileError(Reason.ENCODING, "must be valid base64: it has other characters than ASCII")
    request = DecodeRequest(
        data=data.encode() if isinstance(data, str) else data,
        base64=isinstance(data, str),
        sample_rate=file.sample_rate,
        row_size=file.row_size,
    )
    return msgspec.msgpack.encode(request)
