"""Sampling and stopping by OpenAI's routes, with vLLM's extra parameters: for the request, and for each choice."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from caravan_dialects.api.generation.checks import (
    RANDOM_SEED,
    check_range,
    check_sampled,
    check_stops,
    choice_seed,
    draw_seed,
    effective_temperature,
)
from caravan_dialects.api.generation.rules import token_id_error
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.rules import (
    alias_error,
    biased_token_error,
    choice_parameters_error,
    mirostat_error,
    not_a_probability_error,
    repeated_sampler_error,
    too_many_biases_error,
    too_many_stop_tokens_error,
    unknown_sampler_error,
)
from caravan_dialects.api.openai.schema import GeneratingFields, SamplingFields
from caravan_dialects.text.assembler import TextOptions
from caravan_proto.limits import MAX_BIAS, MAX_STOP_TOKEN_IDS
from caravan_proto.messages.sampling import (
    MAX_SEED,
    RANGES,
    SAMPLERS,
    RequestDefaults,
    SamplingParams,
    defaults_for,
    switched_off,
)
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.generation import StoppingParams

# llama-server's sampler for filling in, which has no effect here; and one that comes last wherever it stands.
_APART = ("infill", "adaptive_p")
_KNOWN = (*SAMPLERS, *_APART)
# llama-server also takes "top-k" and "topk" for "top_k", and so on.
_NAMES = {
    **{name.replace("_", ""): name for name in _KNOWN},
    "typicalp": "typ_p", "typ": "typ_p", "nucleus": "top_p", "temp": "temperature",
}  # fmt: skip
# Each id has one spelling, so that the keys of an object name each token once.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_Value = TypeVar("_Value", bound=float | str)
Biases = tuple[tuple[int, float], ...]


def order_of(field: str, samplers: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of all samplers: those of ``samplers`` in their order, then the others; () for None.

    Raises ValidationError.
    """
    if samplers is None:
        return ()
    used = [name for name in _named(field, samplers) if name not in _APART]
    return tuple(used) + tuple(name for name in SAMPLERS if name not in used)


def left_out(samplers: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields that switch off every sampler but ``samplers``; none for None. Raises ValidationError."""
    if samplers is None:
        return {}
    used = _named("samplers", samplers)
    off = switched_off(name for name in SAMPLERS if name not in used)
    # None would mean the request's own.
    return off if "adaptive_p" in used else {**off, "adaptive_target": -1.0}


def _named(field: str, samplers: Sequence[str]) -> list[str]:
    named: list[str] = []
    for given in samplers:
        name = _NAMES.get(given.lower().replace("_", "").replace("-", ""))
        if name is None:
            raise unknown_sampler_error(field, _KNOWN, given)
        if name in named:
            raise repeated_sampler_error(field, given)
        named.append(name)
    return named


def one_of(field: str, alias: str, given: _Value | None, given_alias: _Value | None) -> _Value | None:
    """Return the value of two fields that mean the same. Raises ValidationError if they differ."""
    if given is not None and given_alias is not None and given != given_alias:
        raise alias_error(field, alias, given, given_alias)
    return given_alias if given is None else given


def check_choice_parameters(choices: Sequence[SamplingFields] | None, candidates: int) -> None:
    """Require one valid entry per candidate. Raises ValidationError, which names the entry and the field."""
    if choices is None:
        return
    if len(choices) != candidates:
        raise choice_parameters_error(candidates, len(choices))
    for index, fields in enumerate(choices):
        check_sampling(fields, f"choice_parameters[{index}].")


def check_sampling(fields: SamplingFields, prefix: str = "") -> None:
    """Require every parameter in its range. ``prefix`` precedes a field's name in errors. Raises ValidationError."""
    for name, allowed in RANGES.items():
        value = getattr(fields, name)
        if allowed.above_low and value is not None and not allowed.low < value <= allowed.high:
            raise not_a_probability_error(prefix + name, value)
        check_sampled(name, value, prefix)
    order_of(f"{prefix}samplers", fields.samplers)


def biases_of(logit_bias: Mapping[str, float] | None, limits: Limits, model: ModelFacts) -> Biases:
    """Return pairs of token id and the bias added to its logit. Raises ValidationError."""
    if logit_bias is None:
        return ()
    if len(logit_bias) > limits.max_logit_biases:
        raise too_many_biases_error(limits.max_logit_biases, len(logit_bias))
    biases = []
    for key, bias in logit_bias.items():
        if not _TOKEN_ID.fullmatch(key) or (token_id := int(key)) >= model.vocabulary_size:
            raise biased_token_error(model.vocabulary_size, key)
        check_range(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
        if bias:
            biases.append((token_id, bias))
    return tuple(biases)


def samplings_of(
    request: GeneratingFields,
    candidates: int,
    model: ModelFacts,
    *,
    alternatives: int | None,
    biases: Biases,
) -> list[SamplingParams]:
    """Return one entry for each candidate of a prompt.

    ``alternatives``: how many each token has beside its own logprob; None for no logprobs at all.
    """
    seed = request.seed
    if seed is None or seed == RANDOM_SEED:
        seed = draw_seed()
    own: Sequence[SamplingFields] = request.choice_parameters or [SamplingFields()] * candidates
    samplings = []
    for index, choice in enumerate(own):
        fields = _merged(request, choice)
        target = fields.adaptive_target
        if fields.mirostat and target is not None and target >= 0:
            raise mirostat_error(target)
        wanted = _wanted(fields, () if request.use_beam_search else model.request_defaults)
        temperature = effective_temperature(wanted.temperature)
        # Signed seeds are read as the same 64 bits, unsigned.
        own_seed = draw_seed() if choice.seed == RANDOM_SEED else choice.seed
        drawn_from = choice_seed(seed & MAX_SEED, index) if own_seed is None else own_seed & MAX_SEED
        samplings.append(
            replace(
                wanted,
                temperature=temperature,
                top_k=min(wanted.top_k, model.vocabulary_size),
                seed=drawn_from if temperature > 0 or fields.dynatemp_range else 0,
                logprobs=alternatives is not None,
                top_n_tokens=alternatives or 0,
                biases=biases,
                samplers=order_of("samplers", fields.samplers),
            )
        )
    return samplings


def _wanted(fields: SamplingFields, defaults: RequestDefaults) -> SamplingParams:
    """Return the parameters that ``fields`` set, and ``defaults`` for the others."""
    given: dict[str, Any] = {name: getattr(fields, name) for name in RANGES}
    given |= defaults_for(given, defaults)
    return SamplingParams(**{name: RANGES[name].meant(sent) for name, sent in given.items() if sent is not None})


def _merged(request: SamplingFields, choice: SamplingFields) -> SamplingFields:
    """Return the choice's fields, with the request's where the choice has none, and without samplers left out."""
    fields = SamplingFields.__struct_fields__
    own = {field: value for field in fields if (value := getattr(choice, field)) is not None}
    merged = {field: getattr(request, field) for field in fields} | own
    return SamplingFields(**(merged | left_out(merged["samplers"])))


def text_options_of(fields: GeneratingFields, limits: Limits) -> TextOptions:
    """Return how tokens become text. Raises ValidationError."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or ()
    return TextOptions(
        stops=check_stops(stops, limits),
        keep_stop=bool(fields.include_stop_str_in_output),
        special_text=fields.skip_special_tokens is False,
        min_tokens=fields.min_tokens or 0,
    )


def stopping_of(fields: GeneratingFields, max_new: int, model: ModelFacts) -> StoppingParams:
    """Return when a sequence of at most ``max_new`` tokens ends. Raises ValidationError."""
    check_range("min_tokens", fields.min_tokens, 0, max_new)
    stop_token_ids = fields.stop_token_ids or ()
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise too_many_stop_tokens_error(MAX_STOP_TOKEN_IDS, len(stop_token_ids))
    for token_id in stop_token_ids:
        if not 0 <= token_id < model.vocabulary_size:
            raise token_id_error("stop_token_ids", model.vocabulary_size, token_id)
    return StoppingParams(
        max_new_tokens=max_new,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=frozenset(stop_token_ids),
        min_tokens=fields.min_tokens or 0,
    )
