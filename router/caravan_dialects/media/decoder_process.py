"""``python -m caravan_dialects.media.decoder_process``: decodes files, one after another, until its input ends.

Files come from anywhere. Libraries that are written in C read them: Pillow pictures, miniaudio sounds, as in llama.cpp,
and pickle the embeddings of PyTorch. The process therefore has limited memory and time, and can open neither files nor
connections. Nothing else imports this module.
"""

import binascii
import io
import resource
import warnings
from collections.abc import Iterable

import miniaudio
import msgspec
from PIL import Image, MpoImagePlugin, TiffImagePlugin, WebPImagePlugin

from caravan_dialects.guarded_child import limit_process, serve
from caravan_dialects.media.embeddings_file import read_embeddings
from caravan_dialects.media.file import (
    DECODER_MEMORY_BYTES,
    MAX_PICTURE_BYTES,
    MAX_PICTURE_PIXELS,
    MAX_SAMPLE,
    MAX_SIDE,
    MAX_SIDE_RATIO,
    MAX_SOUND_BYTES,
    MAX_SOUND_S,
    MIN_SIDE,
    MIN_SOUND_S,
    PICTURES,
    SOUNDS,
    DecodeReply,
    DecodeRequest,
    MediaFileError,
    Reason,
    are_within,
    format_of,
)
from caravan_proto.limits import MAX_MEDIA_BYTES
from caravan_scheduler.core.media import SAMPLE_BYTES

# Pillow would import them when it first needs them, and then the process may open no file. JPEG files with several
# pictures are MPO files, and EXIF data are those of TIFF files.
Image.preinit()
_LOADED = (MpoImagePlugin, TiffImagePlugin, WebPImagePlugin)

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Modes of 16 and 32 bits, which Pillow would cut off at 255. PNG has no others than 16 bits.
_WIDE = frozenset({"I", "I;16", "I;16B", "I;16L"})
_WHITE = (255, 255, 255)

Image.MAX_IMAGE_PIXELS = MAX_PICTURE_PIXELS
_FORMATS = {
    "WAV": miniaudio.FileFormat.WAV,
    "MP3": miniaudio.FileFormat.MP3,
    "FLAC": miniaudio.FileFormat.FLAC,
}
_FRAMES = 16384
_PROBLEM_CHARACTERS = 200
_SPACE = b" \t\r\n"
_DECODER = msgspec.msgpack.Decoder(DecodeRequest)


def decode_picture(data: bytes) -> tuple[int, int, bytes]:
    """Return width, height and pixels of the first frame: turned upright, on white, scaled down if it is large.

    Raises MediaFileError, MemoryError, and whatever Pillow raises for a broken file.
    """
    if len(data) > MAX_PICTURE_BYTES:
        raise MediaFileError(Reason.SIZE, f"must have at most {MAX_PICTURE_BYTES} bytes. Given: {len(data)}")
    known = format_of(data)
    if known not in PICTURES:
        raise MediaFileError(Reason.FORMAT, "must be a PNG, JPEG, WebP or GIF file")
    with warnings.catch_warnings():
        # Pillow warns of much that clients send.
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        try:
            pixels = _pixels_of(data, known)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise MediaFileError(Reason.SIZE, f"must have at most {MAX_PICTURE_PIXELS} pixels") from None
    return (*pixels.size, pixels.tobytes())


def _pixels_of(data: bytes, known: str) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=(known,)) as image:
        _check_size(*image.size)
        # A JPEG file can be decoded at a fraction of its size.
        image.draft("RGB", (MAX_SIDE, MAX_SIDE))
        image.load()
        return _on_white(_upright(_scaled(_colours(image)), image))


def _check_size(width: int, height: int) -> None:
    given = f"Given: {width} x {height}"
    if min(width, height) < MIN_SIDE:
        raise MediaFileError(Reason.SIZE, f"must have sides of at least {MIN_SIDE} pixels. {given}")
    if max(width, height) > MAX_SIDE_RATIO * min(width, height):
        raise MediaFileError(Reason.SIZE, f"must be at most {MAX_SIDE_RATIO} times as long as wide. {given}")


def _colours(image: Image.Image) -> Image.Image:
    """Return the picture in RGB, or in RGBA if it is transparent anywhere."""
    if image.mode in _WIDE:
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


def _scaled(image: Image.Image) -> Image.Image:
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.BICUBIC, reducing_gap=2.0)
    return image


def _upright(image: Image.Image, original: Image.Image) -> Image.Image:
    try:
        turn = _TURNS.get(original.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001 - broken EXIF data can raise anything, and is no reason to refuse the picture
        turn = None
    return image if turn is None else image.transpose(turn)


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    white = Image.new("RGB", image.size, _WHITE)
    white.paste(image, mask=image.getchannel("A"))
    return white


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
        if not are_within(chunk, MAX_SAMPLE):
            raise MediaFileError(Reason.BROKEN, f"has samples that are not between -{MAX_SAMPLE:g} and {MAX_SAMPLE:g}")
        samples += chunk.tobytes()
        if len(samples) > limit_s * sample_rate * SAMPLE_BYTES:
            raise MediaFileError(Reason.SIZE, f"must last at most {limit_s} seconds")
    seconds = len(samples) / (SAMPLE_BYTES * sample_rate)
    if seconds < MIN_SOUND_S:
        raise MediaFileError(Reason.SIZE, f"must last at least {MIN_SOUND_S} seconds. Given: {seconds:.3f}")
    return bytes(samples)


def decode(request: DecodeRequest) -> DecodeReply:
    """Decode one file. Whatever that raises becomes the ``problem`` of the reply."""
    try:
        data = _from_base64(request.data) if request.base64 else request.data
        if request.sample_rate:
            return DecodeReply(content=decode_sound(data, request.sample_rate))
        if request.row_size:
            return DecodeReply(content=read_embeddings(data, request.row_size))
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
