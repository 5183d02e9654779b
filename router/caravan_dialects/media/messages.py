"""The messages between the router and its decoding processes, in MessagePack."""

import msgspec


class DecodeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """``data``: the file, in ``base64`` or as it is. ``sample_rate``: that of the sound to make; 0 for a picture."""

    data: bytes
    base64: bool
    sample_rate: int


class DecodeReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ``content``, with ``width`` and ``height`` if it is a picture; or why there is none: a `Reason` and words."""

    content: bytes = b""
    width: int = 0
    height: int = 0
    reason: str = ""
    problem: str = ""
