"""Forms and replies of ``/v1/audio/transcriptions`` and ``/v1/audio/translations``."""

from typing import Annotated, Literal

import msgspec

from caravan_dialects.api.generation.schema import ModelName

SoundFile = Annotated[
    bytes, msgspec.Meta(description="A WAV, MP3 or FLAC file", extra_json_schema={"format": "binary"})
]


class TranslationForm(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of a form. ``prompt``: the instruction to the model, in place of the default one.

    ``response_format`` must be "json". ``max_tokens``: default: all that fits in the context.
    """

    file: SoundFile
    model: ModelName = None
    prompt: str | None = None
    response_format: Literal["json"] | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


class TranscriptionForm(TranslationForm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``language``: that of the audio, in any words; it becomes part of the prompt.

    ``stream``: events of OpenAI's, a ``transcript.text.delta`` for each part of the text.
    """

    language: str | None = None
    stream: bool | None = None


class SpokenTokens(msgspec.Struct, frozen=True):
    """Tokens of a prompt: those of the audio, and those of the text around it."""

    audio_tokens: int
    text_tokens: int


class SpokenUsage(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["tokens"] = "tokens"
    input_tokens: int
    input_token_details: SpokenTokens
    output_tokens: int
    total_tokens: int


class Spoken(msgspec.Struct, frozen=True):
    """The transcript."""

    text: str
    usage: SpokenUsage


class SpokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event of a stream. ``type``: "transcript.text.delta" (with ``delta``), at the end "transcript.text.done"."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: str | None = None
    text: str | None = None
    usage: SpokenUsage | None = None
