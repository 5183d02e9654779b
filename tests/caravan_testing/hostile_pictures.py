"""Files that claim to be pictures, as somebody would send them who wants to harm the server. All are made here."""

import array
import io
import math
import random
import struct
import wave
import zlib
from collections.abc import Iterator
from typing import Any

from PIL import Image

_PNG = b"\x89PNG\r\n\x1a\n"
_HEADER_BYTES = 33


def picture_file(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """Return ``image`` as a file."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(side: int = 24, mode: str = "RGB") -> Image.Image:
    """Return a picture that compresses badly, the same each time."""
    channels = len(Image.new(mode, (1, 1)).getbands())
    return Image.frombytes(mode, (side, side), random.Random(side).randbytes(side * side * channels))


def png_chunk(kind: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of(width: int, height: int, rows: bytes = b"", *chunks: bytes) -> bytes:
    """Return a PNG file that claims a size, whatever its rows are; ``chunks`` come before them."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = png_chunk(b"IDAT", zlib.compress(rows, 9))
    return _PNG + png_chunk(b"IHDR", header) + b"".join(chunks) + data + png_chunk(b"IEND", b"")


def hostile_files() -> Iterator[tuple[str, bytes]]:
    """Yield more than 300 files and what is wrong with each."""
    files = {
        "png": picture_file(noise()),
        "jpeg": picture_file(noise(), "JPEG"),
        "webp": picture_file(noise(), "WEBP"),
        "gif": picture_file(noise().quantize(16), "GIF"),
    }
    for kind, data in files.items():
        for place in range(_HEADER_BYTES):
            yield f"{kind} with byte {place} flipped", data[:place] + bytes((data[place] ^ 0xFF,)) + data[place + 1 :]
        for part in range(32):
            yield f"{kind} cut after {part}/32", data[: len(data) * part // 32]
        for seed in range(12):
            yield f"{kind} with noise {seed}", _noisy(data, seed)
    yield from _bombs()
    yield from _wrong_types(files)


def _noisy(data: bytes, seed: int) -> bytes:
    draw = random.Random(seed)
    changed = bytearray(data)
    for _ in range(20):
        changed[draw.randrange(_HEADER_BYTES, len(data))] = draw.randrange(256)
    return bytes(changed)


def _bombs() -> Iterator[tuple[str, bytes]]:
    yield "png of 30000 x 30000", png_of(30_000, 30_000, bytes(3_000_000))
    yield "png of 2^31 x 2^31", png_of(2**31 - 1, 2**31 - 1)
    yield "png of 0 x 0", png_of(0, 0)
    yield "png of 7000 x 7000, but for its rows", png_of(7000, 7000, bytes(3_000_000))
    deep = b"a\0\0" + zlib.compress(bytes(64 << 20))
    yield "text of 64 MB in a png", png_of(4, 4, bytes(3), png_chunk(b"zTXt", deep))
    yield "colour profile of 64 MB", png_of(4, 4, bytes(3), png_chunk(b"iCCP", deep))
    yield "100 texts of a png", png_of(4, 4, bytes(3), *[png_chunk(b"tEXt", b"a\0" + bytes(60_000))] * 100)
    large = struct.pack("<HHBBB", 65535, 65535, 0xF0, 0, 0)
    yield "gif of 65535 x 65535", b"GIF89a" + large + bytes(6) + b"," + bytes(4) + large[:4] + b"\0\2\2\x4c\1\0;"
    frame = struct.pack("<HHHHB", 65000, 65000, 60000, 60000, 0)
    small = struct.pack("<HHBBB", 4, 4, 0xF0, 0, 0)
    yield "gif with a frame outside of it", b"GIF89a" + small + bytes(6) + b"," + frame + b"\2\2\x4c\1\0;"
    jpeg = bytearray(picture_file(noise(), "JPEG"))
    at = jpeg.index(b"\xff\xc0")
    jpeg[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    yield "jpeg of 65535 x 65535", bytes(jpeg)
    yield "webp of 16384 x 16384", _webp_of(16384)
    for side in ((1, 1), (1, 100), (100, 1), (2, 500)):
        yield f"{side[0]} x {side[1]}", picture_file(Image.new("RGB", side))


def _webp_of(side: int) -> bytes:
    extended = b"\0" * 4 + (side - 1).to_bytes(3, "little") * 2
    body = b"WEBPVP8X" + struct.pack("<I", len(extended)) + extended
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _wrong_types(files: dict[str, bytes]) -> Iterator[tuple[str, bytes]]:
    image = noise()
    for kind in ("BMP", "TIFF", "ICO", "PPM", "TGA", "PCX", "DDS", "JPEG2000", "PDF", "EPS", "SGI", "ICNS"):
        yield kind.lower(), picture_file(image.resize((32, 32)), kind)
    yield (
        "svg",
        b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    )
    yield "svg that is compressed", zlib.compress(b"<svg/>")
    yield "html", b"<html><script>alert(1)</script></html>"
    yield "nothing", b""
    yield "zeros", bytes(10_000)
    yield "a program", b"\x7fELF" + bytes(1000)
    yield "an archive before a picture", b"PK\3\4" + files["png"]
    yield "a document before a picture", b"%PDF-1.7\n" + files["jpeg"]
    yield "postscript", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(w) file"
    yield "a film", b"\0\0\0\x18ftypmp42" + bytes(1000)
    yield "heic", b"\0\0\0\x18ftypheic" + bytes(1000)
    yield "avif", b"\0\0\0\x18ftypavif" + bytes(1000)
    yield "a sound", b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0" + bytes(100)
    yield "a script for ImageMagick", b"push graphic-context\nimage over 0,0 0,0 'url(http://localhost/)'\n"
    for kind, data in files.items():
        yield f"only the start of {kind}", data[:12]
        yield f"{kind} after a byte", b"\0" + data


def harmless_files() -> Iterator[tuple[str, bytes]]:
    """Yield files that look odd and are pictures nonetheless."""
    image = noise()
    yield "apng", picture_file(image, save_all=True, append_images=[noise(24)] * 20)
    yield "cmyk", picture_file(image.convert("CMYK"), "JPEG")
    exif = Image.Exif()
    exif[0x010E] = "x" * 60_000
    yield "jpeg with large exif", picture_file(image, "JPEG", exif=exif)
    yield "png with large exif", picture_file(image, exif=b"Exif\0\0MM\0*\0\0\0\x08" + bytes(500_000))
    entries = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", 65535) + bytes(12 * 5000)
    yield "jpeg with 5000 entries of exif", picture_file(image, "JPEG", exif=entries)
    yield "png before an archive", picture_file(image) + b"PK\3\4" + bytes(1000)
    yield "jpeg before a script", picture_file(image, "JPEG") + b"<script>alert(1)</script>"
    yield (
        "gif of 500 frames",
        picture_file(
            image.quantize(16), "GIF", save_all=True, append_images=[noise(24).quantize(4), image.quantize(16)] * 250
        ),
    )
    yield "large colour profile", picture_file(image, icc_profile=bytes(200_000))


RATE = 16_000
_FLAC_BLOCK = 4096


def tone(seconds: float, rate: int = RATE, channels: int = 1) -> "array.array[int]":
    """Return 16-bit samples of 440 Hz, the same in all channels."""
    values = (int(9000 * math.sin(at * 2 * math.pi * 440 / rate)) for at in range(int(seconds * rate)))
    return array.array("h", (value for value in values for _ in range(channels)))


def wav(samples: "array.array[int]", rate: int = RATE, channels: int = 1) -> bytes:
    """Return a WAV file of 16-bit samples."""
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.tobytes())
    return out.getvalue()


def float_wav(values: list[float], rate: int = RATE) -> bytes:
    """Return a WAV file of 32-bit floats."""
    data = struct.pack(f"<{len(values)}f", *values)
    form = b"fmt " + struct.pack("<IHHIIHH", 16, 3, 1, rate, rate * 4, 4, 32)
    body = b"WAVE" + form + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def silent_mp3(frames: int) -> bytes:
    """Return an MP3 file of ``frames`` frames of 1152 samples at 44.1 kHz: 128 kbit/s, one channel, no signal."""
    return (b"\xff\xfb\x90\xc4" + bytes(413)) * frames


def flac(samples: "array.array[int]", rate: int = RATE) -> bytes:
    """Return a FLAC file of one channel whose frames have the samples as they are."""
    sizes = struct.pack(">HH", _FLAC_BLOCK, _FLAC_BLOCK) + bytes(6)
    described = (rate << 44 | 0 << 41 | 15 << 36 | len(samples)).to_bytes(8, "big")
    info = sizes + described + bytes(16)
    blocks = [samples[start : start + _FLAC_BLOCK] for start in range(0, len(samples), _FLAC_BLOCK)]
    frames = b"".join(_flac_frame(number, block) for number, block in enumerate(blocks))
    return b"fLaC\x80" + len(info).to_bytes(3, "big") + info + frames


def _flac_frame(number: int, block: "array.array[int]") -> bytes:
    assert number < 128, "the number of a frame is coded as a character of UTF-8"
    head = b"\xff\xf8\x70\x08" + bytes((number,)) + struct.pack(">H", len(block) - 1)
    head += bytes((_crc(head, 0x07, 8),))
    frame = head + b"\x02" + struct.pack(f">{len(block)}h", *block)
    return frame + _crc(frame, 0x8005, 16).to_bytes(2, "big")


def _crc(data: bytes, polynomial: int, bits: int) -> int:
    top, mask, value = 1 << (bits - 1), (1 << bits) - 1, 0
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = ((value << 1) ^ (polynomial if value & top else 0)) & mask
    return value
