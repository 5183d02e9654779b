"""Checks sampling parameters by the rules of the HTTP API, as far as these need no model."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from caravan.errors import RequestError
from caravan.options import MAX_CANDIDATES
from caravan.request_bodies import completion_body, named_refusals
from caravan.sampling_params import SamplingParams, StructuredOutputsParams
from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.choices import choices_of
from caravan_dialects.api.openai.constraints import constraint_of
from caravan_dialects.api.openai.sampling import check_choice_parameters, check_sampling, text_options_of

# A server may have other limits, which it names itself.
_LIMITS = Limits(max_best_of=MAX_CANDIDATES)
_MOST = 1 << 31


def check_params(params: SamplingParams) -> None:
    """Raise RequestError for what is wrong with any model."""
    _check_type("structured_outputs", params.structured_outputs, StructuredOutputsParams, "StructuredOutputsParams")
    _check_type("logit_bias", params.logit_bias, Mapping, "an object of biases by token id")
    for name, kind, what in (
        ("choice_parameters", Mapping, "objects"),
        ("logits_processors", Callable, "functions"),
    ):
        _check_type(name, (entries := getattr(params, name)), Sequence, f"a list of {what}")
        for entry in entries or ():
            _check_type(name, entry, kind, what)
    with named_refusals():
        body = completion_body((0,), params, params.max_tokens or 1)
        check_sampling(body)
        check_choice_parameters(body.choice_parameters, choices_of(body, _LIMITS).candidates)
        for name in ("logprobs", "prompt_logprobs"):
            check_range(name, getattr(params, name), 0, _MOST)
        check_range("min_tokens", body.min_tokens, 0, params.max_tokens or _MOST)
        text_options_of(body, _LIMITS)
        constraint_of(body, _LIMITS)


def _check_type(name: str, value: Any, kind: Any, what: str) -> None:
    if value is not None and (not isinstance(value, kind) or isinstance(value, str)):
        raise RequestError(f"`{name}` must be {what}. Given: {value!r:.80}")
