"""``/v1/audio``: transcribes audio, in a chat with a model that reads audio, whose message has the audio."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from caravan_dialects.api.generation.asked import Answer, Asked
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.parts import MediaParts, text_for
from caravan_dialects.api.generation.run import Run
from caravan_dialects.api.generation.schema import ModelName
from caravan_dialects.api.openai.chat.output import read_whole
from caravan_dialects.api.openai.chat.schema import ChatRequest, Message
from caravan_dialects.api.openai.chat.validation import ChatSource, ValidChat, validate_whole_chat
from caravan_dialects.api.openai.errors import OPENAI
from caravan_dialects.api.openai.usage import media_tokens
from caravan_dialects.api.stream import Events
from caravan_dialects.chat.tool_parser import TextPart

SoundFile = Annotated[
    bytes, msgspec.Meta(description="A WAV, MP3 or FLAC file", extra_json_schema={"format": "binary"})
]
_ENCODER = msgspec.json.Encoder()


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


# llama-server's words.
_TRANSCRIBE, _TRANSLATE = "Transcribe audio to text", "Translate audio to English text"


class AskedSpoken(Asked):
    """The text of a sound, in its own language or in English."""

    dialect = OPENAI
    operation = "chat"

    def __init__(self, form: TranscriptionForm | TranslationForm) -> None:
        self._form = form
        self.model = form.model
        self.streamed = isinstance(form, TranscriptionForm) and bool(form.stream)

    async def validate(self, context: Context) -> "SpokenAnswer":
        form, media = self._form, MediaParts(context.model.media)
        if not media.hears:
            text_for("file", "input_audio")
        message = Message(role="user", content=_instruction(form) + media.sound("file", form.file))
        body = ChatRequest(
            messages=[message],
            model=form.model,
            # As OpenAI's models are, unless something else is asked for.
            temperature=0.0 if form.temperature is None else form.temperature,
            max_tokens=form.max_tokens,
            seed=form.seed,
        )
        source = ChatSource(body=body, names=("file", "max_tokens"), clamps=True, media=media)
        return SpokenAnswer(await validate_whole_chat(context, source))


def _instruction(form: TranscriptionForm | TranslationForm) -> str:
    usual = _TRANSCRIBE if isinstance(form, TranscriptionForm) else _TRANSLATE
    language = form.language if isinstance(form, TranscriptionForm) else None
    return (form.prompt or usual) + (f" (language: {language})" if language else "")


class SpokenAnswer(Answer):
    """One text. Thoughts are left out."""

    def __init__(self, chat: ValidChat) -> None:
        super().__init__((chat.request,))
        self._chat = chat
        self._texts: list[str] = []

    async def whole(self, runs: Sequence[Run]) -> bytes:
        [output] = await read_whole([self._chat.output(run) for run in runs])
        text = output.message().content or ""
        return _ENCODER.encode(Spoken(text.strip(), self._usage(runs[0])))

    async def send(self, events: Events, index: int, run: Run) -> None:
        output = self._chat.output(run)
        async for ready in run:
            messages = []
            for pieces in ready:
                for part in output.push(pieces):
                    if isinstance(part, TextPart) and part.text:
                        self._texts.append(part.text)
                        messages.append(_ENCODER.encode(SpokenEvent(type="transcript.text.delta", delta=part.text)))
            await events.send(*messages)

    def last_event(self, runs: Sequence[Run]) -> bytes | None:
        text = "".join(self._texts).strip()
        return _ENCODER.encode(SpokenEvent(type="transcript.text.done", text=text, usage=self._usage(runs[0])))

    def _usage(self, run: Run) -> SpokenUsage:
        prompt = len(run.spec.prompt)
        _, heard = media_tokens(run.spec)
        assert isinstance(heard, int), "audio has tokens"
        return SpokenUsage(
            input_tokens=prompt,
            input_token_details=SpokenTokens(heard, prompt - heard),
            output_tokens=run.tokens,
            total_tokens=prompt + run.tokens,
        )
