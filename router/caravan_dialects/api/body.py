"""Decodes a request's body into its type."""

import re
from typing import TypeVar

import msgspec

from caravan_dialects.api.errors import BodyMismatchError, MalformedBodyError

T = TypeVar("T")

_REASON_CHARACTERS = 300
_UNKNOWN_FIELD = re.compile(r"unknown field `([^`]*)`")
_PATH = re.compile(r" at `\$\.([^`]*)`$")


def decode(data: bytes | msgspec.Raw, decoder: msgspec.json.Decoder[T], inside: str = "") -> T:
    """Decode a body, or the part of it that is ``inside`` a field. Raises MalformedBodyError, BodyMismatchError."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise mismatch(error, inside) from error
    except msgspec.DecodeError as error:
        raise MalformedBodyError(str(error)) from error
    except UnicodeDecodeError as error:
        raise MalformedBodyError("a string is not valid UTF-8") from error
    except RecursionError as error:
        raise MalformedBodyError("it is nested too deeply") from error


def mismatch(error: msgspec.ValidationError, inside: str) -> BodyMismatchError:
    """Return the error of a body that has not its type, or of the part of it that is ``inside`` a field."""
    # The message quotes the client's own names and values, which may have any length.
    reason = _placed(str(error)[:_REASON_CHARACTERS], inside)
    return BodyMismatchError(_field_of(reason), reason)


def _placed(reason: str, inside: str) -> str:
    if not inside:
        return reason
    return reason.replace("at `$", f"at `$.{inside}", 1) if "at `$" in reason else f"{reason} - at `$.{inside}`"


def _field_of(message: str) -> str:
    path, unknown = _PATH.search(message), _UNKNOWN_FIELD.search(message)
    return ".".join(found[1] for found in (path, unknown) if found)
