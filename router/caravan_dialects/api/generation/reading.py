"""Reads bodies of clients that send more than is known here: see decision 18."""

from typing import Generic, TypeVar

import msgspec

from caravan_dialects.api.body import decode, mismatch
from caravan_dialects.api.errors import BodyMismatchError, MalformedBodyError
from caravan_dialects.api.generation.marked_fields import without_effect
from caravan_dialects.api.generation.tolerance import Fitting, shape_of

T = TypeVar("T", bound=msgspec.Struct)

_ANYTHING = msgspec.json.Decoder()


class BodyReader(Generic[T]):
    """Reads bodies of one type. The usual one takes a single pass; one that does not fit is read again and mended."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind)
        self._shape = shape_of(kind)

    def read(self, data: bytes | msgspec.Raw, *, exact: bool = False, inside: str = "") -> tuple[T, list[str]]:
        """Return a body, or the part of one that is ``inside`` a field; and the paths of fields that were ignored.

        ``exact``: unknown fields are refused. Whole numbers may be written with a decimal point in any case.
        Raises MalformedBodyError, BodyMismatchError, ValidationError.
        """
        unknown: list[str] = []
        # A type that allows unknown fields does not tell which there are.
        if exact or self._kind.__struct_config__.forbid_unknown_fields:
            try:
                body = decode(data, self._decoder, inside)
            except BodyMismatchError as error:
                body, unknown = self._mended(data, inside, Fitting(not exact, [inside]), error)
        else:
            body, unknown = self._mended(data, inside, Fitting(True, [inside]), None)
        return body, [*unknown, *without_effect(body, inside)]

    def _mended(
        self, data: bytes | msgspec.Raw, inside: str, fitting: Fitting, refused: BodyMismatchError | None
    ) -> tuple[T, list[str]]:
        """Read ``data`` with what can be mended. ``refused``: why it does not fit as it is."""
        try:
            given = decode(data, _ANYTHING, inside)
        except BodyMismatchError:
            # The first reading knows the field.
            raise refused or BodyMismatchError("", "a number is out of range") from None
        try:
            # The paths are those of the whole body, the messages of `convert` are completed by `mismatch`.
            fitted = self._shape.fit(given, fitting)
            if refused is not None and not fitting.changed:
                raise refused
            return msgspec.convert(fitted, self._kind), fitting.ignored
        except msgspec.ValidationError as error:
            raise mismatch(error, inside) from error
        except RecursionError as error:
            raise MalformedBodyError("it is nested too deeply") from error
