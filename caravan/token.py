"""A sampled token."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A token that was sampled.

    ``piece``: its raw bytes; a character may be split over several tokens. ``special``: it is no part of the text.
    ``ends``: it ends an output. ``logprob``: natural logarithm of its probability under the model's own distribution.
    ``text``: its bytes as text, with U+FFFD for bytes that form no character; "" if it is no part of the text. In
    `Conversation.generate`, it is what the token adds to the text of the output.
    """

    id: int
    piece: bytes
    special: bool
    ends: bool
    logprob: float
    text: str
