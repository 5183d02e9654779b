"""The conversation of `caravan run`: messages in OpenAI's form, settings, and branches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from caravan.prompts import CHAT_PARAMS
from caravan.request_fields import portable
from caravan.sampling_params import SamplingParams, StructuredOutputsParams

Message = Mapping[str, Any]


class ConversationFileError(Exception):
    """A file holds no conversation; the message says why."""


class _File(msgspec.Struct, kw_only=True):
    """The form of a saved conversation."""

    messages: list[dict[str, Any]]
    model: str = ""
    settings: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What was said so far. ``settings``: sampling parameters by name. ``images``: those of the next message."""

    system: str = ""
    messages: tuple[Message, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    images: tuple[Path, ...] = ()

    @property
    def prompt(self) -> list[Message]:
        """The messages for the model."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters. Raises TypeError for a name that is none."""
        return _params(self.settings)

    def asked(self, text: str) -> "Conversation":
        """Return it with a message of the user. Raises RequestError, OSError for an image that cannot be read."""
        content: Any = text
        if self.images:
            content = [*self.images, text]
        [message] = portable([{"role": "user", "content": content}])
        return replace(self, messages=(*self.messages, message), images=())

    def answered(self, text: str) -> "Conversation":
        """Return it with the model's answer."""
        return replace(self, messages=(*self.messages, {"role": "assistant", "content": text}))

    def without_answer(self) -> "Conversation | None":
        """Return it up to the last message of the user; None if there is none."""
        messages = list(self.messages)
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        return replace(self, messages=tuple(messages)) if messages else None


def _params(settings: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a file or of `/set`. Raises TypeError for an unknown name or form."""
    outputs = settings.get("structured_outputs")
    constraint = None if outputs is None else StructuredOutputsParams(**outputs)
    return replace(CHAT_PARAMS, **{**settings, "structured_outputs": constraint})


def written(conversation: Conversation, model: str) -> bytes:
    """Return the file of a conversation."""
    content = _File(
        messages=[dict(one) for one in conversation.prompt], model=model, settings=dict(conversation.settings)
    )
    return msgspec.json.format(msgspec.json.encode(content)) + b"\n"


def read(data: bytes) -> Conversation:
    """Return the conversation of a file. Raises ConversationFileError."""
    try:
        content = msgspec.json.decode(data, type=_File)
    except msgspec.MsgspecError as error:
        raise ConversationFileError(f"it is no saved conversation: {error}") from None
    for number, message in enumerate(content.messages):
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str | list):
            raise ConversationFileError(f"messages[{number}] has no role or no content")
    system, messages = "", content.messages
    if messages and messages[0]["role"] == "system" and isinstance(messages[0]["content"], str):
        system, messages = messages[0]["content"], messages[1:]
    try:
        _params(content.settings)
    except TypeError as error:
        raise ConversationFileError(f"settings cannot be used: {error}") from None
    return Conversation(system=system, messages=tuple(messages), settings=content.settings)


@dataclass(slots=True)
class Branches:
    """The branches of a conversation, of which one goes on; they are numbered from 1."""

    kept: list[Conversation] = field(default_factory=lambda: [Conversation()])
    current: int = 1

    @property
    def conversation(self) -> Conversation:
        """The branch that goes on."""
        return self.kept[self.current - 1]

    @conversation.setter
    def conversation(self, value: Conversation) -> None:
        self.kept[self.current - 1] = value

    def fork(self) -> None:
        """Go on in a copy."""
        self.kept.append(self.conversation)
        self.current = len(self.kept)

    def go_to(self, number: str) -> str:
        """Go on in another branch. Return "", or why that is not possible."""
        if not number.isdecimal() or not 1 <= int(number) <= len(self.kept):
            return f"there are conversations 1 to {len(self.kept)}. Given: {number}"
        self.current = int(number)
        return ""


def titles(branches: Sequence[Conversation]) -> list[str]:
    """Return how many messages each branch has, and how its last message of the user begins."""
    found = []
    for branch in branches:
        said = next((message for message in reversed(branch.messages) if message["role"] == "user"), None)
        text = "" if said is None else next(_texts(said), "")
        found.append(f"{len(branch.messages)} messages{f': {text[:60]}' if text else ''}")
    return found


def _texts(message: Message) -> Any:
    content = message["content"]
    if isinstance(content, str):
        yield content
    else:
        yield from (part["text"] for part in content if part.get("type") == "text")
