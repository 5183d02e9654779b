"""Turns calls of this package into the fields of the HTTP API's bodies, whose rules and defaults they share."""

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from caravan.errors import RequestError
from caravan.prompts import PlainPrompt, check_messages
from caravan.sampling_params import SamplingParams

# How files of sound begin; those of AAC and the like are not decoded.
_SOUNDS = {b"RIFF": "wav", b"fLaC": "flac", b"ID3": "mp3", b"\xff\xfb": "mp3", b"\xff\xf3": "mp3", b"\xff\xf2": "mp3"}
# The keys of parts that hold a picture or a sound itself: those of transformers and vLLM.
_KEYS = ("image", "image_pil", "audio")
_DEFAULTS = SamplingParams()
# Fields whose names or forms differ from those of the bodies.
_TRANSLATED = {"max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs", "choice_parameters"}
# Functions of the program, which no body can carry.
FUNCTIONS = {"logits_processors"}


def portable(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return ``messages`` with each image and audio clip of a program as a part that JSON can hold.

    In the content of a message, that is a Pillow image, a `Picture`, a `Sound`, the path of a file or its bytes:
    as a part by itself, or as ``{"type": "image", "image": ...}`` and ``{"type": "audio", "audio": ...}``. A text by
    itself is a part, too. Raises RequestError, OSError.
    """
    check_messages(messages)
    return [
        {**message, "content": [_part(part) for part in content]}
        if isinstance(content := message.get("content"), list | tuple)
        else message
        for message in messages
    ]


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        return _shown(part)
    key = part.get("type")
    if key in _KEYS and key in part:
        value = part[key]
        return _shown(Path(value) if isinstance(value, str) else value)
    return part


def _shown(value: Any) -> dict[str, Any]:
    if isinstance(value, Path):
        value = value.read_bytes()
    if not isinstance(value, bytes | bytearray):
        # Imported here, since it needs the router's types.
        from caravan.media import file_of

        value = file_of(value)
    return _file_part(bytes(value))


def _file_part(data: bytes) -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    kind = next((kind for start, kind in _SOUNDS.items() if data.startswith(start)), None)
    if kind is not None and data[8:12] != b"WEBP":
        return {"type": "input_audio", "input_audio": {"data": text, "format": kind}}
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def completion_fields(prompt: PlainPrompt, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a completion; of embeddings, none says what they are."""
    return sampling_fields(params) | {
        "prompt": prompt if isinstance(prompt, str) else list(prompt) if isinstance(prompt, tuple) else "",
        "max_tokens": params.max_tokens,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
    }


def chat_fields(
    messages: Sequence[Mapping[str, Any]], params: SamplingParams, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of a chat completion; ``options`` are such fields as they are. Raises RequestError."""
    if params.prompt_logprobs is not None:
        raise RequestError("`prompt_logprobs` needs a prompt, not messages")
    fields = sampling_fields(params) | {
        "messages": portable(messages),
        "max_tokens": params.max_tokens,
        "logprobs": None if params.logprobs is None else True,
        "top_logprobs": params.logprobs or None,
    }
    return fields | {name: value for name, value in options.items() if value is not None}


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that are not at their defaults: a beam search refuses those of sampling, whatever they say.

    ``max_tokens`` and log probabilities are not among them, since their names depend on the route.
    """
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name not in _TRANSLATED | FUNCTIONS and value != getattr(_DEFAULTS, field.name):
            fields[field.name] = value if isinstance(value, str) or not isinstance(value, Sequence) else list(value)
    if params.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias.items()}
    if (outputs := params.structured_outputs) is not None:
        fields["structured_outputs"] = {
            field.name: list(value) if field.name == "choice" else value
            for field in dataclasses.fields(outputs)
            if (value := getattr(outputs, field.name)) is not None
        }
    if params.choice_parameters is not None:
        fields["choice_parameters"] = [dict(choice) for choice in params.choice_parameters]
        if params.best_of is None:
            fields.setdefault("n", len(params.choice_parameters))
    return fields
