"""Reads URLs of pictures. Only those that have the picture in them are read: nothing is ever fetched."""

from caravan_dialects.api.generation.rules import data_url_error

_SCHEME, _CODING = "data:", ";base64"
# A URL may have millions of characters.
_SHOWN = 200


def data_of(field: str, url: str) -> str:
    """Return the base64 of a data URL, whose media type is not looked at. Raises ValidationError."""
    head, comma, data = url.partition(",")
    if not comma or head[: len(_SCHEME)].lower() != _SCHEME or not head.lower().endswith(_CODING):
        raise data_url_error(field, url[:_SHOWN])
    return data
