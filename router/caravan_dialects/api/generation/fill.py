"""Tokenizes the texts around a gap that is to be filled in."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_dialects.api.generation.bounds import Bounds
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.prompt import tokenize_plain
from caravan_dialects.text.fill_in_middle import Gap, fill_prompt
from caravan_proto.messages.model import FillTokens
from caravan_scheduler.core.engine import Engine

_SNIPPET = "\n\n--- snippet ---\n\n"
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
