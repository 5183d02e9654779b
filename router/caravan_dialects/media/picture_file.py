"""Decodes a picture with Pillow. Only the decoding process imports this module."""

import io
import warnings

from PIL import Image, MpoImagePlugin, TiffImagePlugin, WebPImagePlugin

from caravan_dialects.media.kinds import PICTURES, format_of
from caravan_dialects.media.limits import MAX_PICTURE_BYTES, MAX_PICTURE_PIXELS, MAX_SIDE, MAX_SIDE_RATIO, MIN_SIDE
from caravan_dialects.media.problems import MediaFileError, Reason

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
            pixels = _decoded(data, known)
        except (Image.DecompressionBombError, Image.DecompressionBombWarning):
            raise MediaFileError(Reason.SIZE, f"must have at most {MAX_PICTURE_PIXELS} pixels") from None
    return (*pixels.size, pixels.tobytes())


def _decoded(data: bytes, known: str) -> Image.Image:
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
