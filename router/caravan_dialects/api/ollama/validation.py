"""Translates Ollama's requests into chat requests, and reads the texts to embed and how long a model stays loaded."""

import math
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from caravan_dialects.api.generation.checks import check_positive, check_range
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.parts import NO_MEDIA, MediaParts, text_for
from caravan_dialects.api.generation.prompt import (
    Truncation,
    check_prompt_ids,
    check_token_ids,
    nth,
    tokenize_texts,
    tokenize_truncated,
)
from caravan_dialects.api.generation.rules import too_many_prompts_error, unsupported_field_error
from caravan_dialects.api.generation.schema import Format, JsonFormat, JsonObjectFormat
from caravan_dialects.api.generation.serving import serving_fields
from caravan_dialects.api.ollama import schema as ollama
from caravan_dialects.api.ollama.rules import insert_error, keep_alive_error
from caravan_dialects.api.openai.chat.enforced import SchemaPlaces
from caravan_dialects.api.openai.chat.schema import ChatRequest, FunctionCall, Message, NamedToolChoice, Tool, ToolCall
from caravan_dialects.api.openai.chat.validation import ChatSource
from caravan_dialects.api.openai.sampling import check_sampling
from caravan_dialects.api.openai.schema import SamplingFields
from caravan_dialects.chat.thought_format import thought_format_of
from caravan_proto.messages.sampling import RANGES, RequestDefaults, defaults_for

DEFAULT_TEMPERATURE, DEFAULT_TOP_K, DEFAULT_TOP_P = 0.8, 40, 0.9
_NEW_TOKENS = "options.num_predict"
_MAX_INT32 = 2**31 - 1
_ALL_THAT_FITS = frozenset({-1, -2})
_SAMPLING = tuple({*RANGES} & {*ollama.OllamaOptions.__struct_fields__} - {"seed"})
_HUBS = frozenset({"hf.co", "huggingface.co"})
# Of a picture in an error.
_SHOWN = 40
_NO_OPTIONS = ollama.OllamaOptions()
_PLACES = SchemaPlaces(answer="format")
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}


def bare_name(name: str | None) -> str:
    """Return a model's name without what Ollama's clients add; "" for None.

    That is the tag of names that have none, and the host of a hub before OWNER/REPOSITORY.
    """
    bare = (name or "").removesuffix(":latest")
    host, _, rest = bare.partition("/")
    return rest if host in _HUBS and "/" in rest else bare


def source_of_generate(body: ollama.OllamaGenerateRequest, context: Context) -> ChatSource:
    """Translate a body of ``/api/generate``. Raises ValidationError."""
    if body.template:
        raise unsupported_field_error("template", "set it to null", body.template)
    media = MediaParts(context.model.media)
    if body.images and body.suffix:
        raise unsupported_field_error("images", "set `suffix` to null", body.images[0][:_SHOWN])
    prompt = _pictures("images", body.images, media) + (body.prompt or "")
    messages = [Message(role="user", content=prompt)]
    if body.suffix and context.model.fill is None:
        raise insert_error(context.model.name)
    earlier = body.context or ()
    if earlier:
        check_prompt_ids("context", earlier, context)
    as_it_is = not context.model.chat_template
    if body.raw or body.suffix:
        neutral = "set `suffix` to null" if body.suffix else "set `raw` to false"
        for field, given in (("system", body.system), ("context", body.context)):
            if given:
                raise unsupported_field_error(field, neutral, given)
    elif as_it_is:
        # Ollama's template for a model that has none is the prompt.
        prompt = "\n\n".join(filter(None, (body.system, prompt)))
    elif body.system:
        messages.insert(0, Message(role="system", content=body.system))
    return ChatSource(
        body=_chat_request(body, messages, context),
        raw=prompt if body.raw or body.suffix or as_it_is else None,
        suffix=body.suffix or "",
        earlier=tuple(earlier),
        names=("context + prompt" if earlier else "prompt", _NEW_TOKENS),
        clamps=True,
        media=media,
        places=_PLACES,
    )


def source_of_chat(body: ollama.OllamaChatRequest, context: Context) -> ChatSource:
    """Translate a body of ``/api/chat``. Raises ValidationError."""
    if body.shift:
        raise unsupported_field_error("shift", "set it to false", body.shift)
    media = MediaParts(context.model.media)
    messages = [_message(f"messages[{number}]", message, media) for number, message in enumerate(body.messages or ())]
    chat = _chat_request(body, messages, context, tools=body.tools, tool_choice=body.tool_choice)
    return ChatSource(
        body=chat if body.truncate is False else msgspec.structs.replace(chat, truncation="auto"),
        names=("messages", _NEW_TOKENS),
        clamps=True,
        max_prompt_tokens=None if body.options is None else body.options.num_ctx,
        media=media,
        places=_PLACES,
    )


def _chat_request(
    body: ollama.OllamaFields,
    messages: Sequence[Message],
    context: Context,
    tools: list[Tool] | None = None,
    tool_choice: str | NamedToolChoice | None = None,
) -> ChatRequest:
    if body.think and thought_format_of(context.model.chat_template) is None:
        raise unsupported_field_error("think", "set it to false: the model does not think", body.think)
    options = _NO_OPTIONS if body.options is None else body.options
    check_ranges(options, "options.")
    num_predict = _MAX_INT32 if options.num_predict in _ALL_THAT_FITS else options.num_predict
    return ChatRequest(
        messages=list(messages),
        model=bare_name(body.model),
        max_tokens=num_predict,
        **_sampling(options, context.model.request_defaults),
        seed=None if options.seed is None or options.seed < 0 else options.seed,
        stop=options.stop,
        repetition_penalty=options.repeat_penalty,
        response_format=_format(body.format),
        **_thinking(body.think),
        # Those of a body without the former are left out, as Ollama leaves them out.
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        tools=tools,
        tool_choice=tool_choice,
        **serving_fields(body),
    )


def _sampling(options: ollama.OllamaOptions, defaults: RequestDefaults) -> dict[str, Any]:
    given = {name: value for name in _SAMPLING if (value := getattr(options, name)) is not None}
    # Mirostat decides how many tokens are likely enough, as in llama.cpp.
    own = defaults_for({**given, "repetition_penalty": options.repeat_penalty}, defaults)
    mirostat = own.get("mirostat") if options.mirostat is None else options.mirostat
    filters = {} if mirostat else {"top_k": DEFAULT_TOP_K, "top_p": DEFAULT_TOP_P}
    # The model's own penalty is found where OpenAI's requests are read.
    own = {name: value for name, value in own.items() if name in _SAMPLING}
    return {"temperature": DEFAULT_TEMPERATURE, **filters, **own, **given}


def _thinking(think: bool | str | None) -> dict[str, Any]:
    """Return the fields of a chat request that have the meaning of ``think``. Raises ValidationError."""
    match think:
        case None:
            return {}
        case bool():
            return {"chat_template_kwargs": {"enable_thinking": think}}
        case "low" | "medium" | "high" | "max":
            return {"reasoning_effort": think}
        case _:
            raise unsupported_field_error("think", 'set it to true, false, "low", "medium", "high" or "max"', think)


def check_ranges(options: ollama.OllamaOptions, where: str) -> None:
    """Require that options are in the ranges that they have for every model. Raises ValidationError.

    ``where``: what precedes their names in a message.
    """
    check_positive(f"{where}num_ctx", options.num_ctx)
    if options.num_predict not in _ALL_THAT_FITS:
        check_positive(f"{where}num_predict", options.num_predict)
    check_range(f"{where}seed", options.seed, -(2**63), 2**63 - 1)
    check_sampling(SamplingFields(**{name: getattr(options, name) for name in _SAMPLING}), where)
    penalty = RANGES["repetition_penalty"]
    check_range(f"{where}repeat_penalty", options.repeat_penalty, penalty.low, penalty.high)


def _format(asked: str | dict[str, Any] | None) -> Format | None:
    match asked:
        case None | "":
            return None
        case "json":
            return JsonObjectFormat()
        case dict(schema):
            return JsonFormat(value=schema)
        case _:
            raise unsupported_field_error("format", 'set it to "json" or to a JSON schema', asked)


def _message(field: str, message: ollama.OllamaMessage, media: MediaParts) -> Message:
    # What the model says has no pictures.
    pictures = _pictures(f"{field}.images", message.images, NO_MEDIA if message.role == "assistant" else media)
    calls = [
        ToolCall(
            id=call.id or str(number), function=FunctionCall(name=call.function.name, arguments=call.function.arguments)
        )
        for number, call in enumerate(message.tool_calls or ())
    ]
    return Message(
        role=message.role,
        content=pictures + (message.content or ""),
        name=message.tool_name or (message.name if message.role == "tool" else None),
        tool_calls=calls or None,
        tool_call_id=message.tool_call_id,
        reasoning_content=message.thinking,
    )


def _pictures(field: str, images: Sequence[str] | None, media: MediaParts) -> str:
    """Return the marks of pictures, which are before the text, as in Ollama. Raises ValidationError."""
    if not images:
        return ""
    if not media.sees:
        return text_for(f"{field}[0]", "image")
    return "".join(media.picture(f"{field}[{number}]", image) for number, image in enumerate(images))


async def texts_of_embed(body: ollama.OllamaEmbedRequest, context: Context) -> list[tuple[int, ...]]:
    """Return the token ids of each text of ``/api/embed``. Raises ValidationError, EngineError."""
    check_range("dimensions", body.dimensions, 1, context.model.embedding_size)
    limit = _limit(body.options, context)
    # In Ollama, an empty text only loads the model. Here it is always loaded.
    texts = ([body.input] if body.input else []) if isinstance(body.input, str) else body.input or []
    most = context.limits.max_embed_texts
    if len(texts) > most:
        raise too_many_prompts_error("input", most, len(texts))
    return await _token_ids(context, "input", texts, limit, truncate=body.truncate is not False)


async def texts_of_embeddings(body: ollama.OllamaEmbeddingsRequest, context: Context) -> list[tuple[int, ...]]:
    """Return the token ids of the text of ``/api/embeddings``, if there is one. Raises ValidationError, EngineError."""
    limit = _limit(body.options, context)
    texts = [body.prompt] if body.prompt else []
    return await _token_ids(context, "prompt", texts, limit, truncate=body.truncate is not False)


def _limit(options: ollama.OllamaOptions | None, context: Context) -> int:
    """Return the number of tokens that a text may have. Raises ValidationError."""
    limit = context.model.max_embed_tokens
    if options is None:
        return limit
    check_ranges(options, "options.")
    return limit if options.num_ctx is None else min(options.num_ctx, limit)


async def _token_ids(
    context: Context, field: str, texts: Sequence[str], limit: int, *, truncate: bool
) -> list[tuple[int, ...]]:
    engine, bounds = context.engine, context.bounds
    if truncate:
        # Text beyond the longest prompt is far beyond the limit: it need not be tokenized to be cut off.
        texts = [text.encode()[: bounds.max_prompt_bytes].decode(errors="ignore") for text in texts]
    tokens = await tokenize_texts(engine, field, texts, bounds)
    for place, text in enumerate(texts):
        if truncate and len(tokens[place]) > limit:
            cut = await tokenize_truncated(engine, field, text, bounds, Truncation(limit=limit, keep_end=False))
            tokens[place] = cut.token_ids
        check_token_ids(nth(field, place, len(texts)), tokens[place], limit, context.model)
    return tokens


def seconds_of(keep_alive: str | float | None) -> float | None:
    """Return seconds, infinity for a negative value; None if nothing is said. Raises ValidationError.

    A number is in seconds; a text is a duration of Go such as "5m" or "1h30m", or a number.
    Source: Ollama's docs/api.md, and ``api.Duration`` in its api/types.go.
    """
    if keep_alive is None or keep_alive == "":
        return None
    seconds = keep_alive if isinstance(keep_alive, float | int) else _parse(keep_alive)
    if seconds is None or math.isnan(seconds):
        raise keep_alive_error(keep_alive)
    return math.inf if seconds < 0 else seconds


def _parse(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    unsigned = text.removeprefix("-")
    parts = _PART.findall(unsigned)
    if not parts or "".join(number + unit for number, unit in parts) != unsigned:
        return None
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    return -seconds if text.startswith("-") else seconds
