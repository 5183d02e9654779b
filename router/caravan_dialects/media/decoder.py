"""Decodes the files of pictures and sounds, in processes that may die or hang at any time."""

import asyncio

import msgspec

from caravan_dialects.guarded_process import Ended, GuardedProcesses, ProcessEndedError, Worker
from caravan_dialects.media.decoded_files import DecodedFiles, key_of
from caravan_dialects.media.file import MediaFile
from caravan_dialects.media.limits import MAX_PICTURE_BYTES, MAX_SOUND_BYTES, REMEMBERED_BYTES, TIME_LIMIT_S
from caravan_dialects.media.messages import DecodeReply, DecodeRequest
from caravan_dialects.media.problems import MediaFileError, Reason
from caravan_scheduler.core.errors import HelperError
from caravan_scheduler.core.media import Media, Picture, Sound

# With two, a file that uses up its time does not stop all others.
_PROCESSES = 2

_DECODER = msgspec.msgpack.Decoder(DecodeReply)


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
        """Return the picture or the sound that ``file`` has; ``owner`` sent it. Raises MediaFileError, HelperError."""
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
    limit = MAX_SOUND_BYTES if file.sample_rate else MAX_PICTURE_BYTES
    if file.size_bytes > limit:
        raise MediaFileError(Reason.SIZE, f"must have at most {limit} bytes. Given: {file.size_bytes}")


def _request(file: MediaFile) -> bytes:
    data = file.data
    if isinstance(data, str):
        if not data.isascii():
            raise MediaFileError(Reason.ENCODING, "must be valid base64: it has other characters than ASCII")
        request = DecodeRequest(data=data.encode(), base64=True, sample_rate=file.sample_rate)
    else:
        request = DecodeRequest(data=data, base64=False, sample_rate=file.sample_rate)
    return msgspec.msgpack.encode(request)
