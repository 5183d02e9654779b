"""Pictures and sounds of a program become parts of messages that any server reads."""

import base64
import io
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

import pytest

from caravan import Picture, RequestError, Sound
from caravan.request_fields import chat_fields, portable
from caravan.sampling_params import SamplingParams

_PICTURE = Picture.of(2, 3, bytes(range(18)))


def _parts(*content: Any) -> list[Any]:
    (message,) = portable([{"role": "user", "content": list(content)}])
    assert message["role"] == "user"
    parts: list[Any] = message["content"]
    return parts


def _file(part: Any) -> bytes:
    if part["type"] == "input_audio":
        return base64.b64decode(part["input_audio"]["data"])
    assert part["type"] == "image_url"
    head, _, data = part["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64"
    return base64.b64decode(data)


def _pixels(png: bytes) -> tuple[int, int, bytes]:
    """Read the file of a picture without filters."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(png):
        (size,) = struct.unpack_from(">I", png, at)
        kind, data = png[at + 4 : at + 8], png[at + 8 : at + 8 + size]
        assert struct.unpack_from(">I", png, at + 8 + size) == (zlib.crc32(kind + data),)
        chunks[kind] = data
        at += 12 + size
    assert set(chunks) == {b"IHDR", b"IDAT", b"IEND"}
    width, height, *form = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert form == [8, 2, 0, 0, 0]
    lines = zlib.decompress(chunks[b"IDAT"])
    row = 1 + 3 * width
    assert {lines[at] for at in range(0, len(lines), row)} == {0}
    return width, height, b"".join(lines[at + 1 : at + row] for at in range(0, len(lines), row))


class _Pillow:
    size = (2, 3)
    mode = "RGBA"

    def convert(self, mode: str) -> "_Pillow":
        raise AssertionError(f"it need not be converted to {mode}")

    def tobytes(self) -> bytes:
        raise AssertionError("its file has all that it has")

    def save(self, file: io.BytesIO, form: str) -> None:
        file.write(f"{form} file".encode())


def test_pixels_become_a_file() -> None:
    (part,) = _parts(_PICTURE)
    assert _pixels(_file(part)) == (2, 3, _PICTURE.rgb)


def test_samples_become_a_file() -> None:
    sound = Sound.of(16_000, struct.pack("<3f", 0.0, 0.5, -1.0))
    (part,) = _parts({"type": "audio", "audio": sound})
    assert part["input_audio"]["format"] == "wav"
    data = _file(part)
    assert data.endswith(sound.samples)
    with pytest.raises(wave.Error, match="unknown format: 3"), wave.open(io.BytesIO(data)):
        pass  # the standard library reads all of the header up to the kind of the samples: floats


def test_texts_pictures_of_pillow_paths_and_bytes_are_parts(tmp_path: Path) -> None:
    path = tmp_path / "picture"
    path.write_bytes(b"GIF89a")
    known = {"type": "image_url", "image_url": {"url": "data:x"}}
    parts = _parts("what", _Pillow(), path, b"\xff\xd8\xff", {"type": "image", "image": str(path)}, known)
    assert parts[0] == {"type": "text", "text": "what"}
    assert [_file(part) for part in parts[1:5]] == [b"PNG file", b"GIF89a", b"\xff\xd8\xff", b"GIF89a"]
    assert parts[5] is known


@pytest.mark.parametrize(
    ("data", "form"),
    [(b"RIFF____WAVE", "wav"), (b"fLaC", "flac"), (b"ID3", "mp3"), (b"\xff\xfb\x90", "mp3"), (b"RIFF____WEBP", "")],
)
def test_files_of_sound_are_known_by_their_beginning(data: bytes, form: str) -> None:
    (part,) = _parts(data)
    assert _file(part) == data
    assert part.get("input_audio", {}).get("format", "") == form


def test_other_parts_are_refused() -> None:
    with pytest.raises(RequestError, match="Given: 5"):
        _parts(5)
    with pytest.raises(OSError, match="nowhere"):
        _parts(Path("/nowhere"))


def test_messages_of_text_are_left_as_they_are() -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant"}]
    assert [one is other for one, other in zip(portable(messages), messages, strict=True)] == [True, True]
    fields = chat_fields([{"role": "user", "content": [_PICTURE]}], SamplingParams(), {})
    assert fields["messages"][0]["content"] == _parts(_PICTURE)
