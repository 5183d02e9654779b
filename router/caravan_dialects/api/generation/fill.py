"""Makes prompts for filling in the middle of a text."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import tokenize_plain
from caravan_dialects.api.limits import Bounds
from caravan_proto.messages.model import FillTokens
from caravan_scheduler.core.engine import Engine

# When both texts are too long, a quarter of the room is for the one after the gap, as in llama-server.
_SHARE_AFTER = 4
_SNIPPET = "\n\n--- snippet ---\n\n"


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


# llama-server writes these names: no client sends any.
_REPOSITORY, _FILE = "myproject\n", "filename\n"


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A part of another file. ``field``: where the client wrote it."""

    field: str
    name: str
    text: str


async def prompt_before(context: Context, before: tuple[int, ...], suffix: str) -> tuple[int, ...]:
    """Return the prompt for what comes after the tokens ``before`` and before the text ``suffix``.

    The model must have tokens for it. Raises ValidationError, NoShardError, TextTooLongError.
    """
    fill = context.model.fill
    assert fill is not None, "a request with a suffix was accepted for a model that cannot fill in"
    after = await tokenize_plain(context.engine, "suffix", suffix, context.bounds)
    return fill_prompt(fill, Gap(before=before, after=after))


async def context_tokens(
    engine: Engine, fill: FillTokens, files: Sequence[OtherFile], bounds: Bounds
) -> tuple[int, ...]:
    """Return the tokens of other files as llama-server writes them; none if there are no ``files``.

    Qwen2.5-Coder (arXiv:2409.12186) defines the form for vocabularies that have tokens for it.
    """
    tokens: list[int] = []

    async def add(field: str, text: str) -> None:
        tokens.extend(await tokenize_plain(engine, field, text, bounds))

    if files and fill.repository is not None:
        tokens.append(fill.repository)
        await add("", _REPOSITORY)
    for file in files:
        if fill.file is None:
            await add("", _SNIPPET)
        else:
            tokens.append(fill.file)
            await add(f"{file.field}.filename", f"{file.name}\n")
        await add(f"{file.field}.text", file.text)
    if files and fill.file is not None:
        tokens.append(fill.file)
        await add("", _FILE)
    return tuple(tokens)
