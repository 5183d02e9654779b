"""The APIs that can be measured: how each asks for a generation, and what its events mean."""

from enum import StrEnum
from typing import Any, Protocol, assert_never

import msgspec

from caravan_serve.bench.request import Asked, BenchRequest, DrawnTokens, StreamRecord

_DONE = b"[DONE]"
_GREEDY = Asked()


class Api(StrEnum):
    """Names as on the command line."""

    COMPLETIONS = "completions"
    GENERATE = "generate"
    EMBEDDINGS = "embeddings"


class Dialect(Protocol):
    """One API: a path, a body, and the meaning of its events."""

    @property
    def path(self) -> str: ...

    @property
    def fixes_length(self) -> bool:
        """Whether a request can demand an exact number of tokens. If not, the model may end an output earlier."""
        ...

    @property
    def generates(self) -> bool:
        """Whether a request asks for output tokens."""
        ...

    @property
    def streams(self) -> bool:
        """Whether the reply is a stream of events; else its body is the one event."""
        ...

    def body(self, request: BenchRequest) -> bytes: ...

    def read(self, data: bytes, when: float, record: StreamRecord) -> None:
        """Note in ``record`` what an event that arrived at ``when`` says. Raises msgspec.MsgspecError if unreadable."""


def dialect_of(api: Api, *, model: str, asked: Asked) -> Dialect:
    """Return the dialect of ``api``. ``model`` is the model name to send, where the API has a field for it.

    `Api.GENERATE` can only stream, and heeds nothing of ``asked`` but ``drawn``, without ``min_p``. `Api.EMBEDDINGS`
    heeds nothing of it.
    """
    match api:
        case Api.COMPLETIONS:
            return CompletionsDialect(model=model, asked=asked)
        case Api.GENERATE:
            return GenerateDialect(drawn=asked.drawn)
        case Api.EMBEDDINGS:
            return EmbeddingsDialect(model=model)
        case _:
            assert_never(api)


def _drawn_fields(drawn: DrawnTokens) -> dict[str, object]:
    """Return the fields that both APIs name alike."""
    fields = {"temperature": drawn.temperature, "top_k": drawn.top_k, "top_p": drawn.top_p}
    return {name: value for name, value in fields.items() if value is not None}


def _min_p(drawn: DrawnTokens) -> dict[str, object]:
    return {} if drawn.min_p is None else {"min_p": drawn.min_p}


class _Choice(msgspec.Struct):
    text: str = ""
    index: int = 0
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _CompletionEvent(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | str | None = None


class CompletionsDialect:
    """OpenAI's ``/v1/completions`` with ``ignore_eos`` as vLLM has it, and ``json_schema`` as llama-server has it."""

    path = "/v1/completions"
    generates = True
    fixes_length = True

    def __init__(self, *, model: str, asked: Asked = _GREEDY) -> None:
        self.streams = not asked.whole
        drawn = asked.drawn
        self._fields: dict[str, object] = {"model": model}
        self._fields |= {"temperature": 0} if drawn is None else _drawn_fields(drawn) | _min_p(drawn)
        if self.streams:
            self._fields |= {"stream": True, "stream_options": {"include_usage": True}}
        if asked.logprobs is not None:
            self._fields["logprobs"] = asked.logprobs
        if asked.schema is not None:
            # Such an output ends when it is complete.
            self._fields["json_schema"] = msgspec.Raw(asked.schema.encode())
        else:
            self._fields["ignore_eos"] = True
        self._decoder = msgspec.json.Decoder(_CompletionEvent)

    def body(self, request: BenchRequest) -> bytes:
        """Ask for exactly ``request.max_tokens`` tokens per choice."""
        fields = {**self._fields, "prompt": request.prompt, "max_tokens": request.max_tokens}
        if request.n > 1:
            fields["n"] = request.n
        return msgspec.json.encode(fields)

    def read(self, data: bytes, when: float, record: StreamRecord) -> None:
        """Count each non-empty text as one token."""
        if data == _DONE:
            record.ended = True
            return
        event = self._decoder.decode(data)
        if event.error is not None:
            record.error = event.error if isinstance(event.error, str) else str(event.error.get("message", event.error))
            return
        for choice in event.choices:
            # Some servers end a choice by an extra event without text: that is no token.
            if choice.text:
                record.add_token(choice.index, when)
                record.add_text(choice.index, choice.text)
        if event.usage is not None:
            record.ended = record.ended or not self.streams
            record.prompt_tokens = event.usage.prompt_tokens
            record.usage_tokens = event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                record.cached_tokens = event.usage.prompt_tokens_details.cached_tokens


class _Token(msgspec.Struct):
    id: int


class _Details(msgspec.Struct):
    generated_tokens: int
    input_length: int | None = None


class _GenerateEvent(msgspec.Struct):
    token: _Token | None = None
    details: _Details | None = None
    error: str | None = None


class GenerateDialect:
    """TGI's ``/generate_stream``: one event per token, with details in the last one.

    TGI's API cannot demand an exact length: its ``ignore_eos_token`` exists only between router and shard. Caravan has
    ``min_new_tokens`` for that, which TGI ignores, as it does all unknown fields.
    """

    path = "/generate_stream"
    generates = True
    fixes_length = False
    streams = True

    def __init__(self, *, drawn: DrawnTokens | None = None) -> None:
        self._sampling: dict[str, object] = {"do_sample": False}
        if drawn is not None:
            self._sampling = {"do_sample": True} | _drawn_fields(drawn)
        self._decoder = msgspec.json.Decoder(_GenerateEvent)

    def body(self, request: BenchRequest) -> bytes:
        """Ask for a stream of ``request.max_tokens`` tokens, or fewer on TGI. TGI streams only one choice."""
        assert request.n == 1, f"n={request.n} on /generate_stream"
        parameters = {
            "max_new_tokens": request.max_tokens,
            "min_new_tokens": request.max_tokens,
            **self._sampling,
            "details": True,
        }
        return msgspec.json.encode({"inputs": request.prompt, "parameters": parameters})

    def read(self, data: bytes, when: float, record: StreamRecord) -> None:
        """Count each token; the event with ``details`` ends the stream, since TGI sends no ``[DONE]``."""
        event = self._decoder.decode(data)
        if event.error is not None:
            record.error = event.error
            return
        if event.token is not None:
            record.add_token(0, when)
        if event.details is not None:
            record.prompt_tokens = event.details.input_length
            record.usage_tokens = event.details.generated_tokens
            record.ended = True


class _EmbeddedUsage(msgspec.Struct):
    prompt_tokens: int


class _Embedded(msgspec.Struct):
    usage: _EmbeddedUsage
    data: list[dict[str, Any]]


class EmbeddingsDialect:
    """OpenAI's ``/v1/embeddings``, a text in each request."""

    path = "/v1/embeddings"
    generates = False
    fixes_length = False
    streams = False

    def __init__(self, *, model: str) -> None:
        self._model = model
        self._decoder = msgspec.json.Decoder(_Embedded)

    def body(self, request: BenchRequest) -> bytes:
        """Ask for the vector of ``request.prompt``."""
        return msgspec.json.encode({"model": self._model, "input": request.prompt})

    def read(self, data: bytes, when: float, record: StreamRecord) -> None:
        """Count the tokens of the text."""
        record.prompt_tokens = self._decoder.decode(data).usage.prompt_tokens
        record.usage_tokens = 0
        record.ended = True
