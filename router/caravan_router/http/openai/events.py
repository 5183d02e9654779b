"""OpenAI's streams: server-sent events that close with ``[DONE]``; and the words that replies share."""

from dataclasses import replace

from caravan_router.core.sampling import FinishReason
from caravan_router.http.openai.schema import StreamOptions
from caravan_router.http.server.event_stream import SERVER_SENT

EVENTS_UNTIL_DONE = replace(SERVER_SENT, end=SERVER_SENT.frame(b"[DONE]"))

# OpenAI has one word for the model's own end of text and for a stop string.
FINISH_WORDS = {
    FinishReason.LENGTH: "length",
    FinishReason.EOS_TOKEN: "stop",
    FinishReason.STOP_SEQUENCE: "stop",
}


def wants_usage(options: StreamOptions | None) -> bool:
    """Return whether a stream's last chunk has the usage."""
    return options is not None and bool(options.include_usage)
