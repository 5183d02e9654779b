"""OpenAI's streams: server-sent events that close with ``[DONE]``; and the words that replies share."""

import secrets
from collections.abc import Sequence
from dataclasses import replace

from caravan_dialects.api.openai.schema import StreamOptions
from caravan_dialects.api.stream import SERVER_SENT
from caravan_dialects.text.assembler import Piece
from caravan_proto.messages.results import FinishReason

EVENTS_UNTIL_DONE = replace(SERVER_SENT, end=SERVER_SENT.frame(b"[DONE]"))

# OpenAI has one word for the model's own end of text and for a stop string.
FINISH_WORDS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
    FinishReason.STOP_TOKEN: "stop",
}


def token_ids_of(pieces: Sequence[Piece]) -> list[int]:
    """Return vLLM's ``token_ids``: all generated tokens, the end token included."""
    return [piece.token.token_id for piece in pieces]


def wants_usage(options: StreamOptions | None) -> bool:
    """Return whether a stream's last chunk has the usage."""
    return options is not None and bool(options.include_usage)


def wants_usage_of_each(options: StreamOptions | None) -> bool:
    """Return whether each chunk of a stream has the usage so far of its choice, as in vLLM."""
    return options is not None and bool(options.include_usage and options.continuous_usage_stats)


def new_call_id() -> str:
    """Return a random call id in OpenAI's format."""
    return f"call_{secrets.token_hex(12)}"
