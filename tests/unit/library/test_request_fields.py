"""What the package is called with becomes what the HTTP API has, and errors of the router's layers become its own."""

import base64
import dataclasses
import io
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

import caravan
from caravan import ChoiceParameters, Picture, RequestError, SamplingParams, Sound
from caravan.client import RespondOptions
from caravan.request_bodies import chat_body
from caravan.request_fields import FUNCTIONS, chat_fields, completion_fields, portable
from caravan.valid_requests import named_errors
from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.reading import BodyReader
from caravan_dialects.api.generation.rules import (
    PromptTooLongError,
    PromptTooManyBytesError,
    TotalTooLongError,
    empty_prompt_error,
)
from caravan_dialects.api.openai.completions.schema import CompletionRequest
from caravan_dialects.api.openai.responses.schema import ResponseRequest
from caravan_dialects.api.openai.schema import SamplingFields
from caravan_scheduler.core.errors import DeadlineError, GenerationError, TextTooLongError

_PICTURE = Picture.of(2, 3, bytes(range(18)))
TOO_LONG = caravan.ContextLengthError
ERRORS = [
    (empty_prompt_error("prompt"), RequestError, "p: `prompt` cannot be empty"),
    (PromptTooLongError("prompt", 255, 256, 256), TOO_LONG, "p: `prompt` must have at most 255 tokens"),
    (PromptTooManyBytesError("prompt", 9, 10, 256), TOO_LONG, "p: `prompt` must have at most 9 bytes"),
    (TotalTooLongError("prompt", "max_tokens", 9, 8, 2), TOO_LONG, "p: `prompt` tokens [+] `max_tokens`"),
    (TextTooLongError("text must have"), TOO_LONG, "p: text must have"),
    (TOO_LONG("long"), TOO_LONG, "p: long"),
    (DeadlineError("late"), caravan.DeadlineError, "late"),
    (GenerationError("lost"), caravan.GenerationError, "lost"),
]


def test_a_choice_has_all_parameters_of_sampling() -> None:
    assert ChoiceParameters.__annotations__.keys() == {*SamplingFields.__struct_fields__}
    assert ChoiceParameters.__annotations__.keys() <= {field.name for field in dataclasses.fields(SamplingParams)}


def test_every_parameter_is_a_field_of_a_completion() -> None:
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    # Functions cannot be sent: a server refuses the fields of their names.
    assert names - FUNCTIONS <= {*CompletionRequest.__struct_fields__}
    for name in FUNCTIONS:
        with pytest.raises(ValidationError, match=f"`{name}` is not supported"):
            BodyReader(CompletionRequest).read(msgspec.json.encode({"prompt": "p", name: ["f"]}))


def test_the_options_of_a_response_are_fields_of_its_body() -> None:
    renamed = {"schema", "reasoning_effort"}
    assert RespondOptions.__annotations__.keys() - renamed <= {*ResponseRequest.__struct_fields__}


def test_only_what_is_not_at_its_default_is_sent() -> None:
    fields = completion_fields("p", SamplingParams(top_k=3, stop=("a", "b"), logit_bias={7: 1.0}))
    assert {name: value for name, value in fields.items() if value is not None} == {
        "prompt": "p", "max_tokens": 16, "top_k": 3, "stop": ["a", "b"], "logit_bias": {"7": 1.0}
    }  # fmt: skip


def test_choice_parameters_say_how_many_outputs_there_are() -> None:
    choices: list[ChoiceParameters] = [{}, {"temperature": 0.5}]
    assert completion_fields("p", SamplingParams(choice_parameters=choices))["n"] == 2


def test_fields_of_a_chat_mean_what_they_mean_to_a_server() -> None:
    messages = [{"role": "user", "content": "hi"}]
    options = {"thinking": {"type": "disabled"}, "repeat_penalty": 1.5, "max_completion_tokens": -1}
    body = chat_body(messages, SamplingParams(max_tokens=None), options)
    assert (body.reasoning_effort, body.repetition_penalty, body.max_completion_tokens) == ("none", 1.5, None)
    for refused in ({"functions": [{"name": "f"}]}, {"frobnicate": 1}):
        [name] = refused
        with pytest.raises(RequestError, match=name):
            chat_body(messages, SamplingParams(), refused)


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


@pytest.mark.parametrize(("error", "kind", "message"), ERRORS)
def test_each_error_has_a_type(error: Exception, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"^{message}") as found, named_errors("p: "):
        raise error
    assert type(found.value) is kind
