"""``python -m caravan_dialects.media.decoder_process``: decodes files, one after another, until its input ends.

Files come from anywhere, and are read by libraries that are written in C. The process therefore has limited memory and
time, and can open neither files nor connections.
"""

import binascii
import resource

import msgspec

from caravan_dialects.guarded_process import limit_process, serve
from caravan_dialects.media.limits import DECODER_MEMORY_BYTES
from caravan_dialects.media.messages import DecodeReply, DecodeRequest
from caravan_dialects.media.picture_file import decode_picture
from caravan_dialects.media.problems import MediaFileError, Reason
from caravan_dialects.media.sound_file import decode_sound

_PROBLEM_CHARACTERS = 200
_SPACE = b" \t\r\n"

_DECODER = msgspec.msgpack.Decoder(DecodeRequest)


def decode(request: DecodeRequest) -> DecodeReply:
    """Decode one file. Whatever that raises becomes the ``problem`` of the reply."""
    try:
        data = _from_base64(request.data) if request.base64 else request.data
        if request.sample_rate:
            return DecodeReply(content=decode_sound(data, request.sample_rate))
        width, height, rgb = decode_picture(data)
        return DecodeReply(content=rgb, width=width, height=height)
    except MediaFileError as error:
        return DecodeReply(reason=error.reason.value, problem=str(error))
    except MemoryError:
        return DecodeReply(reason=Reason.MEMORY.value, problem="needs too much memory to decode")
    except Exception as error:  # noqa: BLE001 - a broken file can make the libraries raise anything
        words = (str(error) or type(error).__name__)[:_PROBLEM_CHARACTERS]
        return DecodeReply(reason=Reason.BROKEN.value, problem=f"cannot be decoded: {words}")


def _from_base64(text: bytes) -> bytes:
    try:
        # Some programs break lines.
        return binascii.a2b_base64(text.translate(None, _SPACE), strict_mode=True)
    except binascii.Error as error:
        raise MediaFileError(Reason.ENCODING, f"must be valid base64: {error}") from None


if __name__ == "__main__":
    limit_process(DECODER_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
    serve(lambda request: msgspec.msgpack.encode(decode(_DECODER.decode(request))))
