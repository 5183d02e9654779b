"""Pictures are decoded to what people see and sounds to one channel at the rate of the model's encoder, bounded."""

import array
import io
import itertools
import math
import struct
import zlib
from collections.abc import Callable
from typing import Any

import miniaudio
import pytest
from PIL import Image

from caravan_dialects.media.decoder_process import decode_picture, decode_sound
from caravan_dialects.media.file import MAX_PICTURE_BYTES, MAX_SIDE, MAX_SOUND_BYTES, MediaFileError, Reason
from caravan_testing.hostile_pictures import RATE, flac, float_wav, silent_mp3, tone, wav

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)
Decode = Callable[[bytes], object]


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **({"lossless": True} if kind == "WEBP" else {}), **options)
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
    assert pixels(decode_picture(file_of(two_by_three(), kind))) == [
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
            data = file_of(grey.convert("RGB"), "WEBP")
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
    assert pixels(decode_picture(file_of(image, kind, exif=exif))) == expected


def test_broken_exif_data_turn_nothing() -> None:
    data = file_of(two_by_three(), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff")
    assert decode_picture(data)[:2] == (2, 3)


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_counts(kind: str) -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, BLUE)]
    data = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
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


def floats(data: bytes) -> "array.array[float]":
    samples = array.array("f")
    samples.frombytes(data)
    return samples


def test_a_sound_of_the_same_rate_keeps_its_samples() -> None:
    samples = tone(0.5)
    decoded = floats(decode_sound(wav(samples), RATE))
    assert len(decoded) == len(samples)
    assert all(abs(got - given / 32768) < 1e-4 for got, given in zip(decoded, samples, strict=True))


@pytest.mark.parametrize(("rate", "channels"), [(44_100, 1), (48_000, 2), (8000, 1)])
def test_another_rate_and_more_channels_become_those_of_the_model(rate: int, channels: int) -> None:
    decoded = floats(decode_sound(wav(tone(0.5, rate, channels), rate, channels), RATE))
    assert abs(len(decoded) - RATE // 2) <= 2
    assert 0.25 < max(decoded) < 0.29
    crossings = sum(before < 0 <= after for before, after in itertools.pairwise(decoded))
    assert abs(crossings - 220) <= 2


def test_flac_and_mp3_are_decoded_too() -> None:
    samples = tone(0.5)
    assert decode_sound(flac(samples), RATE) == decode_sound(wav(samples), RATE)
    silence = floats(decode_sound(silent_mp3(20), 44_100))
    assert abs(len(silence) - 20 * 1152) <= 2 * 1152
    assert set(silence) == {0.0}


def test_the_samples_are_those_that_llama_cpp_would_decode() -> None:
    """Its helper calls miniaudio with the same settings."""
    data = wav(tone(0.3, 44_100, 2), 44_100, 2)
    whole = miniaudio.decode(data, miniaudio.SampleFormat.FLOAT32, nchannels=1, sample_rate=RATE)
    assert floats(decode_sound(data, RATE)) == whole.samples


def at_rate(data: bytes) -> bytes:
    return decode_sound(data, RATE)


REFUSED = [
    pytest.param(decode_picture, lambda: b"", Reason.FORMAT, "must be a PNG, JPEG, WebP or GIF file", id="nothing"),
    pytest.param(decode_picture, lambda: b"hello", Reason.FORMAT, "must be a PNG", id="text"),
    pytest.param(
        decode_picture,
        lambda: b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
        Reason.FORMAT,
        "must be a PNG",
        id="SVG",
    ),
    pytest.param(decode_picture, lambda: file_of(two_by_three(), "BMP"), Reason.FORMAT, "must be a PNG", id="BMP"),
    pytest.param(decode_picture, lambda: file_of(two_by_three(), "TIFF"), Reason.FORMAT, "must be a PNG", id="TIFF"),
    pytest.param(
        decode_picture, lambda: file_of(Image.new("RGB", (16, 16)), "ICO"), Reason.FORMAT, "must be a PNG", id="ICO"
    ),
    pytest.param(decode_picture, lambda: file_of(two_by_three(), "PDF"), Reason.FORMAT, "must be a PNG", id="PDF"),
    pytest.param(decode_picture, lambda: file_of(two_by_three(), "EPS"), Reason.FORMAT, "must be a PNG", id="EPS"),
    pytest.param(decode_picture, lambda: b"RIFF\x24\0\0\0WAVEfmt ", Reason.FORMAT, "must be a PNG", id="sound"),
    pytest.param(
        decode_picture,
        lambda: file_of(Image.new("RGB", (1, 1))),
        Reason.SIZE,
        "at least 2 pixels. Given: 1 x 1",
        id="one pixel",
    ),
    pytest.param(
        decode_picture,
        lambda: file_of(Image.new("RGB", (1, 99))),
        Reason.SIZE,
        "at least 2 pixels. Given: 1 x 99",
        id="a line",
    ),
    pytest.param(
        decode_picture,
        lambda: file_of(Image.new("L", (402, 2))),
        Reason.SIZE,
        "200 times as long as wide. Given: 402 x 2",
        id="a strip",
    ),
    pytest.param(
        decode_picture, lambda: png_of(30_000, 30_000), Reason.SIZE, "must have at most 50000000 pixels", id="bomb"
    ),
    pytest.param(
        decode_picture, lambda: png_of(8000, 8000), Reason.SIZE, "must have at most 50000000 pixels", id="smaller bomb"
    ),
    pytest.param(
        decode_picture,
        lambda: bytes(MAX_PICTURE_BYTES + 1),
        Reason.SIZE,
        f"at most {MAX_PICTURE_BYTES} bytes. Given: 10485761",
        id="bytes",
    ),
    pytest.param(at_rate, lambda: b"", Reason.FORMAT, "must be a WAV, MP3 or FLAC file", id="no sound"),
    pytest.param(at_rate, lambda: b"OggS" + bytes(100), Reason.FORMAT, "must be a WAV", id="ogg"),
    pytest.param(at_rate, lambda: b"RIFF\x24\0\0\0WEBPVP8 ", Reason.FORMAT, "must be a WAV", id="webp"),
    pytest.param(at_rate, lambda: wav(tone(0.05)), Reason.SIZE, "at least 0.1 seconds. Given: 0.050", id="short"),
    pytest.param(at_rate, lambda: wav(array.array("h")), Reason.SIZE, "at least 0.1 seconds", id="no samples"),
    pytest.param(
        at_rate, lambda: float_wav([0.0, math.nan] * RATE), Reason.BROKEN, "not between -16 and 16", id="not a number"
    ),
    pytest.param(at_rate, lambda: float_wav([0.0, math.inf] * RATE), Reason.BROKEN, "not between", id="infinite"),
    pytest.param(at_rate, lambda: float_wav([0.0, -1e30] * RATE), Reason.BROKEN, "not between", id="huge"),
]


@pytest.mark.parametrize(("decode", "make", "reason", "words"), REFUSED)
def test_what_is_not_for_a_model_is_refused(
    decode: Decode, make: Callable[[], bytes], reason: Reason, words: str
) -> None:
    with pytest.raises(MediaFileError) as caught:
        decode(make())
    assert caught.value.reason is reason
    assert words in str(caught.value)


def test_a_long_sound_is_refused_when_it_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caravan_dialects.media.decoder_process.MAX_SOUND_S", 1)
    assert len(decode_sound(wav(tone(1.0)), RATE)) == 4 * RATE
    with pytest.raises(MediaFileError, match="must last at most 1 seconds"):
        decode_sound(wav(tone(1.1)), RATE)


def test_more_bytes_than_allowed_are_refused_unread() -> None:
    with pytest.raises(MediaFileError, match=f"at most {MAX_SOUND_BYTES} bytes"):
        decode_sound(bytes(MAX_SOUND_BYTES + 1), RATE)


@pytest.mark.parametrize("data", [b"fLaC" + bytes(60), b"ID3" + bytes(60), b"RIFF\0\0\0\0WAVE", b"\xff\xfb" * 500])
def test_a_broken_file_raises_an_error_of_its_own(data: bytes) -> None:
    with pytest.raises((miniaudio.MiniaudioError, MediaFileError)):
        decode_sound(data, RATE)
