"""Leaves out the oldest turns of a chat that does not fit the context, whatever dialect it came in."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TypeVar

import msgspec

from caravan_dialects.api.errors import ContextLengthError, ValidationError
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.rules import PromptTooLongError
from caravan_dialects.api.openai.chat.schema import LeftOut, Message
from caravan_dialects.api.openai.chat.validation import ChatSource, ValidChat, validate_whole_chat
from caravan_dialects.api.openai.choices import ONE_CHOICE, Choices
from caravan_scheduler.core.errors import TextTooLongError

# When turns are left out, the rest takes at most this part of the context. Then the next turns fit too, and begin like
# this one, so that the cache is of use.
_KEPT = 0.75
_SYSTEM = frozenset({"system", "developer"})


def does_not_fit(error: Exception) -> bool:
    """Return whether `validate_whole_chat` refused a prompt because it is too long."""
    return isinstance(error, ContextLengthError | TextTooLongError)


def unsplit(starts: Sequence[int], calls: Iterable[tuple[int, int]]) -> list[int]:
    """Return those of ``starts``, the places where turns begin, that part no call from its result.

    ``calls`` has the places of each call and of its result.
    """
    # By place, how many calls more wait for their result than at the place before.
    more: Counter[int] = Counter()
    for call, result in calls:
        more[call + 1] += 1
        more[result + 1] -= 1
    waiting = list(accumulate(more[at] for at in range(max(starts, default=-1) + 1)))
    return [start for start in starts if not waiting[start]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a prompt and its output may take, in tokens. ``total``: the context, for both together.

    ``new``: output asked for; at most half of the context is kept free for it. ``limit``: the client's own for the
    prompt; None for none.
    """

    total: int
    new: int | None
    limit: int | None = None

    @property
    def prompt(self) -> int:
        """Most tokens of a prompt that is good as it is."""
        return min(self.total - min(self.new or 1, self.total // 2), self.limit or self.total)

    @property
    def shortened(self) -> int:
        """Most tokens of a prompt of which turns are left out anew."""
        return min(self.prompt, int(min(self.total, self.limit or self.total) * _KEPT))


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a chat that can be told apart: each begins with the first of the user's messages in a row."""

    messages: Sequence[Message]
    starts: Sequence[int]

    @classmethod
    def of(cls, messages: Sequence[Message]) -> "Turns":
        """Find the turns of ``messages``. No turn parts a call from its result."""
        roles = ["", *(message.role for message in messages)]
        starts = [at for at, (before, role) in enumerate(pairwise(roles)) if role == "user" != before]
        return cls(messages, unsplit(starts, _calls(messages)))

    @property
    def most(self) -> int:
        """How many turns can be left out: the last one stays."""
        return max(0, len(self.starts) - 1)

    def left_out(self, turns: int) -> list[int]:
        """Return the places of the messages that go with the first ``turns`` turns: system messages stay."""
        end = self.starts[turns] if turns else 0
        return [at for at, message in enumerate(self.messages[:end]) if message.role not in _SYSTEM]

    def without(self, turns: int) -> list[Message]:
        """Return the messages that stay without the first ``turns`` turns."""
        gone = set(self.left_out(turns))
        return [message for at, message in enumerate(self.messages) if at not in gone]

    def before(self, place: int) -> int:
        """Return how many turns begin before ``place``."""
        return bisect_left(self.starts, place)


_Tried = TypeVar("_Tried")


async def shortened(
    attempt: Callable[[int], Awaitable[_Tried]],
    size: Callable[[_Tried], int],
    last: int,
    room: Room,
    before: int = 0,
) -> tuple[int, _Tried]:
    """Return how many of the oldest turns are left out, and what ``attempt`` made without them.

    ``attempt`` makes a prompt without that number of turns, at most ``last``; ``size`` counts its tokens. If all of
    these must go, what is left is used as it is, or raises its error. ``before`` is how many an earlier prompt left
    out: as long as this one fits without them, it begins alike, so that the cache is of use.
    """

    async def within(turns: int, tokens: int) -> _Tried | None:
        try:
            tried = await attempt(turns)
        except (ValidationError, TextTooLongError) as error:
            if not does_not_fit(error):
                raise
            return None
        return tried if size(tried) <= tokens else None

    first = min(before, last)
    if (tried := await within(first, room.prompt)) is not None:
        return first, tried
    fewest, most = first + 1, last
    best = None
    while fewest <= most:
        middle = (fewest + most) // 2
        tried = await within(middle, room.shortened)
        if tried is None:
            fewest = middle + 1
        else:
            best, most = (middle, tried), middle - 1
    return best or (last, await attempt(last))


def prompt_size(chat: ValidChat) -> int:
    """Return the number of tokens of a chat's prompt."""
    return len(chat.request.prompt)


async def validate_chat(
    context: Context, source: ChatSource, choices: Choices = ONE_CHOICE, *, before: int = 0
) -> ValidChat:
    """Check a chat; with ``truncation``, leave out its oldest turns if not all fit.

    All system messages, the tools and the last turn stay. ``before``: the place of the first message that an earlier
    prompt of the same chat kept, see `shortened`. Raises what `validate_whole_chat` raises.
    """
    body, limit = source.body, source.max_prompt_tokens
    if body.truncation != "auto":
        chat = await validate_whole_chat(context, source, choices)
        if limit is not None and len(chat.request.prompt) > limit:
            raise PromptTooLongError(source.names[0], limit, len(chat.request.prompt), context.bounds.max_total_tokens)
        return chat
    turns = Turns.of(body.messages)

    async def attempt(gone: int) -> ValidChat:
        shorter = replace(source, body=msgspec.structs.replace(body, messages=turns.without(gone)), clamps=True)
        return await validate_whole_chat(context, shorter, choices)

    total = context.bounds.max_total_tokens
    room = Room(
        total=total if limit is None else min(limit + 1, total), new=body.max_tokens or body.max_completion_tokens
    )
    gone, chat = await shortened(attempt, prompt_size, turns.most, room, turns.before(before))
    return replace(chat, left_out=LeftOut(gone, turns.left_out(gone))) if gone else chat


def _calls(messages: Sequence[Message]) -> Iterable[tuple[int, int]]:
    """Yield the places of each result and of its call, the last one if the result does not name it."""
    by_id: dict[str, int] = {}
    last = None
    for at, message in enumerate(messages):
        if message.role == "tool":
            named = by_id.get(str(message.tool_call_id))
            if (call := last if named is None else named) is not None:
                yield call, at
        elif message.tool_calls:
            last = at
            by_id |= {str(call.id): at for call in message.tool_calls if call.id is not None}
