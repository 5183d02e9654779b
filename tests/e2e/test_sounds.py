"""Sounds reach a real model through OpenAI's client, as words with which a projector of llama.cpp reads them."""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from caravan_testing.gguf_file import fields_of
from caravan_testing.hostile_pictures import float_wav
from caravan_testing.projectors import spelled_sound, write_sound_projector
from caravan_testing.serve_process import MODEL, serve

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

WORDS = " The sky is blue and the sea is green in the light of a summer day"
# What the projector's family has around a sound.
BEGIN, END = "<|audio>", "<audio|>"
TOKENS = 12


@dataclass(frozen=True)
class Hearing:
    """A client of a model that reads the file ``sound`` as WORDS."""

    client: OpenAI
    sound: bytes

    def said(self, *parts: Any) -> tuple[str, int]:
        """Return the reply to a message of ``parts``, and the tokens of its prompt."""
        messages: Any = [{"role": "user", "content": list(parts)}]
        reply = self.client.chat.completions.create(model="any", messages=messages, max_tokens=TOKENS, temperature=0)
        assert reply.usage is not None
        return (reply.choices[0].message.content or "").strip(), reply.usage.prompt_tokens


@pytest.fixture(scope="module")
def hearing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hearing]:
    known = {token: number for number, token in enumerate(fields_of(MODEL)["tokenizer.ggml.tokens"].value)}
    tokens = [known[f"\u0120{word}"] for word in WORDS.split()]
    ids = [*dict.fromkeys(tokens)]
    projector = write_sound_projector(tmp_path_factory.mktemp("sounds") / "projector.gguf", MODEL, ids)
    flags = ("-np", "4", "-c", "16384", "-t", "1", "--kv-layout", "split", "--mmproj", str(projector))
    with serve(*flags) as served, OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        yield Hearing(client, float_wav(spelled_sound(ids, tokens).tolist()))


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def test_openai_python_sends_sounds_in_chats(hearing: Hearing) -> None:
    data = base64.b64encode(hearing.sound).decode()
    sound = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    # Between two parts of text there would be a line break.
    words = text(f"Hear:{BEGIN}{WORDS}{END} Well?")
    assert hearing.said(text("Hear:"), sound, text(" Well?")) == hearing.said(words)
    with pytest.raises(BadRequestError, match="does not read images"):
        hearing.said({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})


def test_openai_python_has_sounds_transcribed(hearing: Hearing) -> None:
    written = hearing.client.audio.transcriptions.create(
        model="any", file=("a.wav", hearing.sound), temperature=0, extra_body={"max_tokens": str(TOKENS)}
    )
    said, prompt_tokens = hearing.said(text(f"Transcribe audio to text{BEGIN}{WORDS}{END}"))
    assert written.text == said
    assert written.usage is not None
    assert written.usage.type == "tokens"
    assert written.usage.input_tokens == prompt_tokens
    details = written.usage.input_token_details
    assert details is not None
    assert details.audio_tokens == len(WORDS.split())
    stream = hearing.client.audio.transcriptions.create(
        model="any", file=("a.wav", hearing.sound), temperature=0, stream=True, extra_body={"max_tokens": str(TOKENS)}
    )
    *deltas, done = list(stream)
    assert "".join(event.delta for event in deltas if event.type == "transcript.text.delta").strip() == said
    assert done.type == "transcript.text.done"
    assert done.text == said
