"""Builds prompts for filling in the middle of a text."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_proto.messages.model import FillTokens

# When both texts are too long, a quarter of the room is for the one after the gap, as in llama-server.
_SHARE_AFTER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The tokens of the texts around a gap. ``context``: tokens that stand before, such as those of other files."""

    before: Sequence[int]
    after: Sequence[int]
    context: Sequence[int] = ()


def fill_prompt(fill: FillTokens, gap: Gap) -> tuple[int, ...]:
    """Return the prompt whose output belongs into the gap.

    Its order, prefix before suffix, is the one that llama-server has by default.
    """
    begin = () if fill.begin is None else (fill.begin,)
    return (*begin, *gap.context, fill.prefix, *gap.before, fill.suffix, *gap.after, fill.middle)


def trimmed(fill: FillTokens, gap: Gap, limit: int) -> Gap:
    """Remove what is farthest from the gap, so that the prompt has at most ``limit`` tokens.

    The context goes first, from its start. If both texts are too long, the one before the gap keeps three quarters of
    the room, as in llama-server.
    """
    room = max(0, limit - len(fill_prompt(fill, Gap(before=(), after=()))))
    after = min(len(gap.after), max(room // _SHARE_AFTER, room - len(gap.before)))
    before = min(len(gap.before), room - after)
    context = min(len(gap.context), room - after - before)
    return Gap(
        before=gap.before[len(gap.before) - before :],
        after=gap.after[:after],
        context=gap.context[len(gap.context) - context :],
    )
