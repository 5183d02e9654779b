"""Turns calls of this package into the fields of the HTTP API's bodies, whose rules and defaults they share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from caravan.chat_media import portable
from caravan.errors import RequestError
from caravan.prompts import PlainPrompt
from caravan.sampling_params import SamplingParams

_DEFAULTS = SamplingParams()
# Fields whose names or forms differ from those of the bodies.
_TRANSLATED = {"max_tokens", "logprobs", "prompt_logprobs", "logit_bias", "structured_outputs", "choice_parameters"}
# Functions of the program, which no body can carry.
FUNCTIONS = {"logits_processors"}


def completion_fields(prompt: PlainPrompt, params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a completion."""
    return sampling_fields(params) | {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
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
