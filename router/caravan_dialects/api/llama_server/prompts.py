"""Tokenizes what llama-server's routes take as prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_dialects.ahead import each
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.fill import Gap, OtherFile, context_tokens, fill_prompt, trimmed
from caravan_dialects.api.generation.prompt import check_prompt_ids, tokenize_plain, tokenize_prompt
from caravan_dialects.api.generation.rules import (
    PromptTooManyBytesError,
    empty_prompt_error,
    too_many_prompts_error,
    unsupported_field_error,
)
from caravan_dialects.api.limits import Bounds, Limits
from caravan_dialects.api.llama_server.rules import infill_error, too_many_extra_parts_error
from caravan_dialects.api.llama_server.schema import InfillRequest, MarkedPrompt

# Editors send some 16, each with some 64 lines.
_MAX_EXTRA_PARTS = 256
# Left for the output where `n_predict` does not say how long it may be, in tokens.
_ROOM = 128

# Texts and token ids, to be joined.
Parts = Sequence[str | int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """The tokens of each prompt. ``truncated``: whether texts around a gap were cut."""

    tokens: Sequence[tuple[int, ...]]
    truncated: bool = False


def split_prompt(
    given: str | Sequence[str | int | list[str | int] | MarkedPrompt] | MarkedPrompt, limits: Limits
) -> list[Parts]:
    """Return the parts of each prompt. A list of texts is one prompt each; with a token id in it, it is one prompt.

    Raises ValidationError.
    """
    if isinstance(given, str | MarkedPrompt):
        return [_parts("prompt", given)]
    plain = [item for item in given if isinstance(item, str | int)]
    if any(isinstance(item, int) for item in given) and len(plain) == len(given):
        return [plain]
    if not given:
        raise empty_prompt_error("prompt")
    if len(given) > limits.max_client_batch_size:
        raise too_many_prompts_error("prompt", limits.max_client_batch_size, len(given))
    return [_parts(f"prompt[{index}]", item) for index, item in enumerate(given)]


def _parts(field: str, given: str | int | list[str | int] | MarkedPrompt) -> Parts:
    """Return the parts of the prompt in ``field``. Raises ValidationError."""
    if isinstance(given, MarkedPrompt):
        if given.multimodal_data:
            neutral = "send images to /v1/chat/completions"
            raise unsupported_field_error(f"{field}.multimodal_data", neutral, f"{len(given.multimodal_data)} entries")
        return [given.prompt_string]
    return given if isinstance(given, list) else [given]


async def joined_prompts(context: Context, prompts: Sequence[Parts]) -> Prompts:
    """Tokenize the parts of each prompt. A begin token comes before a text at the start."""
    return Prompts(tokens=await each(prompts, lambda parts: _joined(context, parts)))


async def _joined(context: Context, parts: Parts) -> tuple[int, ...]:
    size = sum(len(part.encode()) for part in parts if isinstance(part, str))
    if size > context.bounds.max_prompt_bytes:
        raise _too_many_bytes("prompt", size, context.bounds)
    # Every part may have a token of its own, and no text has more of them than bytes.
    if len(parts) > context.bounds.max_prompt_bytes:
        raise _too_many_bytes("prompt", len(parts), context.bounds)
    tokens: list[int] = []
    for number, part in enumerate(parts):
        if isinstance(part, int):
            tokens.append(part)
        elif part:
            made = await tokenize_prompt(context.engine, "prompt", part, context.bounds, add_special=number == 0)
            tokens += made.token_ids
    check_prompt_ids("prompt", tokens, context)
    return tuple(tokens)


def _too_many_bytes(field: str, given: int, bounds: Bounds) -> PromptTooManyBytesError:
    return PromptTooManyBytesError(field, bounds.max_prompt_bytes, given, bounds.max_total_tokens)


async def infill_prompt(context: Context, body: InfillRequest) -> Prompts:
    """Return the prompt for the text between prefix and suffix, cut so that it fits."""
    fill, engine, bounds = context.model.fill, context.engine, context.bounds
    if fill is None:
        raise infill_error(context.model.name)
    extra = body.input_extra or ()
    if len(extra) > _MAX_EXTRA_PARTS:
        raise too_many_extra_parts_error(_MAX_EXTRA_PARTS, len(extra))
    size = sum(len(part.text.encode()) for part in extra)
    if size > bounds.max_prompt_bytes:
        raise _too_many_bytes("input_extra", size, bounds)
    files = [
        OtherFile(f"input_extra[{number}]", part.filename or "tmp", part.text) for number, part in enumerate(extra)
    ]
    before = await tokenize_plain(engine, "input_prefix", body.input_prefix, bounds)
    prompt = await tokenize_plain(engine, "prompt", body.prompt or "", bounds)
    after = await tokenize_plain(engine, "input_suffix", body.input_suffix, bounds)
    gap = Gap(before=before + prompt, after=after, context=await context_tokens(engine, fill, files, bounds))
    wanted = body.n_predict if body.n_predict is not None and body.n_predict > 0 else _ROOM
    room = min(bounds.max_input_tokens, max(bounds.max_total_tokens - wanted, bounds.max_total_tokens // 2))
    kept = trimmed(fill, gap, room)
    return Prompts(tokens=[fill_prompt(fill, kept)], truncated=kept != gap)
