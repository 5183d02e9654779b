"""OpenAI's error envelope, but for a prompt that does not fit: llama-server has an error of its own for it."""

import msgspec

from caravan_dialects.api.error_table import Dialect
from caravan_dialects.api.generation.rules import PromptTooLongError, PromptTooManyBytesError
from caravan_dialects.api.openai.errors import openai_error, openai_status


class LlamaServerError(msgspec.Struct, frozen=True, omit_defaults=True):
    """OpenAI's fields. If the prompt does not fit the context, ``type`` is ``exceed_context_size_error``.

    Then ``code`` is the status, ``n_ctx`` the context, and ``n_prompt_tokens`` the size of the prompt, if it was
    counted.
    """

    message: str
    type: str
    param: str | None
    code: str | int
    n_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class LlamaServerErrorBody(msgspec.Struct, frozen=True):
    """The envelope of llama-server's routes."""

    error: LlamaServerError


def _body(error: Exception, _request_id: str) -> bytes:
    return msgspec.json.encode({"error": _overflow(error) or openai_error(error)})


def _overflow(error: Exception) -> LlamaServerError | None:
    """Return llama-server's error for what does not fit the context; None for others."""
    match error:
        case PromptTooLongError(given=given, total=total):
            return _does_not_fit(error.field, f"{given} tokens", given, total or error.limit)
        case PromptTooManyBytesError(given=given, total=context):
            return _does_not_fit(error.field, f"{given} bytes", msgspec.UNSET, context)
        case _:
            return None


def _does_not_fit(field: str, size: str, counted: int | msgspec.UnsetType, context: int) -> LlamaServerError:
    message = f"request ({size}) exceeds the available context size ({context} tokens), try increasing it"
    return LlamaServerError(message, "exceed_context_size_error", field, 400, counted, context)


LLAMA_SERVER = Dialect(name="llama-server", envelope=LlamaServerErrorBody, status=openai_status, body=_body)
