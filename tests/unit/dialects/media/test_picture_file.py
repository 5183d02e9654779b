"""Pictures are decoded to what people see: upright, on white, in 8 bits, and no larger than encoders look at."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from caravan_dialects.media.decoder_process import decode_picture
from caravan_dialects.media.file import MAX_PICTURE_BYTES, MAX_SIDE, MediaFileError, Reason

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def pixels(decoded: tuple[int, int, bytes]) -> list[list[tuple[int, ...]]]:
    width, height, rgb = decoded
    assert len(rgb) == 3 * width * height
    at = [tuple(rgb[place : place + 3]) for place in range(0, len(rgb), 3)]
    return [at[row * width : (row + 1) * width] for row in range(height)]


def two_by_three() -> Image.Image:
    image = Image.new("RGB", (2, 3), WHITE)
    image.putpixel((0, 0), RED)
    image.putpixel((1, 2), BLUE)
    return image


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP"])
def test_a_picture_has_the_pixels_of_its_file(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    assert pixels(decode_picture(file_of(two_by_three(), kind, **options))) == [
        [RED, WHITE],
        [WHITE, WHITE],
        [WHITE, BLUE],
    ]


def test_a_jpeg_file_is_close_to_what_was_drawn() -> None:
    ((red, green, blue), *_), *_ = pixels(decode_picture(file_of(Image.new("RGB", (16, 16), (200, 30, 40)), "JPEG")))
    assert abs(red - 200) < 4
    assert abs(green - 30) < 4
    assert abs(blue - 40) < 4


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "RGBA", "CMYK", "YCbCr", "I;16", "RGBX", "MPO"])
def test_every_mode_becomes_rgb(mode: str) -> None:
    grey = Image.new("L", (4, 4), 255)
    match mode:
        case "I;16":
            data = file_of(Image.new("I;16", (4, 4), 0xFFFF))
        case "CMYK":
            data = file_of(grey.convert("CMYK"), "JPEG")
        case "YCbCr":
            data = file_of(grey.convert("YCbCr"), "JPEG")
        case "MPO":
            data = file_of(grey.convert("RGB"), "MPO", save_all=True, append_images=[grey.convert("RGB")])
        case "RGBX":
            data = file_of(grey.convert("RGB"), "WEBP", lossless=True)
        case _:
            data = file_of(grey.convert(mode))
    assert pixels(decode_picture(data)) == [[WHITE] * 4] * 4


def test_sixteen_bits_are_scaled_and_not_cut_off() -> None:
    assert decode_picture(file_of(Image.new("I;16", (2, 2), 0x8000)))[2] == bytes([0x80] * 12)


def test_what_is_transparent_is_white() -> None:
    image = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    image.putpixel((0, 0), (255, 0, 0, 255))
    assert pixels(decode_picture(file_of(image))) == [[RED, WHITE], [WHITE, WHITE]]
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([255, 0, 0, 0, 0, 0])
    palette.putpixel((0, 0), 0)
    for kind in ("PNG", "GIF"):
        assert pixels(decode_picture(file_of(palette, kind, transparency=1))) == [[RED, WHITE], [WHITE, WHITE]]


@pytest.mark.parametrize(
    ("orientation", "expected"),
    [
        (1, [[RED, GREEN, BLUE]] * 2),
        (2, [[BLUE, GREEN, RED]] * 2),
        (3, [[BLUE, GREEN, RED]] * 2),
        (4, [[RED, GREEN, BLUE]] * 2),
        (5, [[RED] * 2, [GREEN] * 2, [BLUE] * 2]),
        (6, [[RED] * 2, [GREEN] * 2, [BLUE] * 2]),
        (7, [[BLUE] * 2, [GREEN] * 2, [RED] * 2]),
        (8, [[BLUE] * 2, [GREEN] * 2, [RED] * 2]),
    ],
)
@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_picture_is_turned_as_its_camera_was(
    kind: str, orientation: int, expected: list[list[tuple[int, ...]]]
) -> None:
    image = Image.new("RGB", (3, 2))
    for row in range(2):
        for column, colour in enumerate((RED, GREEN, BLUE)):
            image.putpixel((column, row), colour)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    assert pixels(decode_picture(file_of(image, kind, exif=exif, **options))) == expected


def test_broken_exif_data_turn_nothing() -> None:
    data = file_of(two_by_three(), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decode_picture(data)[:2] == (2, 3)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_counts(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE)]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert pixels(decode_picture(data)) == [[RED] * 4] * 4


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_large_picture_is_scaled_down_and_keeps_its_shape(kind: str) -> None:
    width, height, _ = decode_picture(file_of(Image.new("RGB", (3 * MAX_SIDE, MAX_SIDE), RED), kind))
    assert (width, height) == (MAX_SIDE, round(MAX_SIDE / 3))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, rows: bytes = b"") -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


REFUSED: list[tuple[str, Callable[[], bytes], Reason, str]] = [
    ("nothing", lambda: b"", Reason.FORMAT, "must be a PNG, JPEG, WebP or GIF file"),
    ("text", lambda: b"hello", Reason.FORMAT, "must be a PNG"),
    ("SVG", lambda: b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", Reason.FORMAT, "must be a PNG"),
    ("BMP", lambda: file_of(two_by_three(), "BMP"), Reason.FORMAT, "must be a PNG"),
    ("TIFF", lambda: file_of(two_by_three(), "TIFF"), Reason.FORMAT, "must be a PNG"),
    ("ICO", lambda: file_of(Image.new("RGB", (16, 16)), "ICO"), Reason.FORMAT, "must be a PNG"),
    ("PDF", lambda: file_of(two_by_three(), "PDF"), Reason.FORMAT, "must be a PNG"),
    ("EPS", lambda: file_of(two_by_three(), "EPS"), Reason.FORMAT, "must be a PNG"),
    ("sound", lambda: b"RIFF\x24\0\0\0WAVEfmt ", Reason.FORMAT, "must be a PNG"),
    ("one pixel", lambda: file_of(Image.new("RGB", (1, 1))), Reason.SIZE, "at least 2 pixels. Given: 1 x 1"),
    ("a line", lambda: file_of(Image.new("RGB", (1, 99))), Reason.SIZE, "at least 2 pixels. Given: 1 x 99"),
    ("a strip", lambda: file_of(Image.new("L", (402, 2))), Reason.SIZE, "200 times as long as wide. Given: 402 x 2"),
    ("bomb", lambda: png_of(30_000, 30_000), Reason.SIZE, "must have at most 50000000 pixels"),
    ("smaller bomb", lambda: png_of(8000, 8000), Reason.SIZE, "must have at most 50000000 pixels"),
    ("bytes", lambda: bytes(MAX_PICTURE_BYTES + 1), Reason.SIZE, f"at most {MAX_PICTURE_BYTES} bytes. Given: 10485761"),
]


@pytest.mark.parametrize(("name", "make", "reason", "words"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_what_is_no_picture_for_a_model_is_refused(
    name: str, make: Callable[[], bytes], reason: Reason, words: str
) -> None:
    with pytest.raises(MediaFileError) as caught:
        decode_picture(make())
    assert caught.value.reason is reason
    assert words in str(caught.value)
