"""Sampling parameters of OpenAI's routes, with vLLM's extra ones: for the request, and for each choice."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from caravan_proto.limits import MAX_BIAS
from caravan_router.core.engine import ModelFacts
from caravan_router.core.sampling import SamplingParams
from caravan_router.http.generation.checks import (
    MAX_TOP_K,
    check_candidates,
    check_range,
    check_repetition_penalty,
    check_temperature,
    effective_temperature,
)
from caravan_router.http.generation.rules import UnsupportedFieldError
from caravan_router.http.generation.seeds import MAX_SEED, choice_seed, draw_seed
from caravan_router.http.limits import Limits
from caravan_router.http.openai.rules import (
    AliasError,
    BiasedTokenError,
    ChoiceParametersError,
    NotAProbabilityError,
    TooManyBiasesError,
)
from caravan_router.http.openai.schema import GeneratingFields, SamplingFields

MIN_SEED = -(2**63)
MAX_WINDOW = 2**31 - 1
MAX_DRY = 100.0
_LLAMA_SERVER = (
    "typical_p", "repeat_last_n", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "xtc_probability", "xtc_threshold",
)  # fmt: skip
# Each id has one spelling, so that the keys of an object name each token once.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)

Biases = tuple[tuple[int, float], ...]


def choices_of(fields: GeneratingFields, limits: Limits) -> int:
    """Return the number of choices. Raises ValidationError."""
    n = one_of("n", "n_cmpl", fields.n, fields.n_cmpl)
    check_candidates("n", 1 if n is None else n, limits)
    return 1 if n is None else n


def one_of(field: str, alias: str, given: int | None, given_alias: int | None) -> int | None:
    """Return the value of two fields that mean the same. Raises AliasError if they differ."""
    if given is not None and given_alias is not None and given != given_alias:
        raise AliasError(field, alias, given, given_alias)
    return given_alias if given is None else given


def check_choice_parameters(choices: Sequence[SamplingFields] | None, candidates: int) -> None:
    """Require one valid entry per candidate. Raises ValidationError, which names the entry and the field."""
    if choices is None:
        return
    if len(choices) != candidates:
        raise ChoiceParametersError(candidates, len(choices))
    for index, fields in enumerate(choices):
        check_sampling(fields, f"choice_parameters[{index}].")


def check_sampling(fields: SamplingFields, prefix: str = "") -> None:
    """Require every parameter in its range. ``prefix`` precedes a field's name in errors. Raises ValidationError."""
    check_temperature(f"{prefix}temperature", fields.temperature, zero_allowed=True)
    if fields.top_p is not None and not 0 < fields.top_p <= 1:
        raise NotAProbabilityError(f"{prefix}top_p", fields.top_p)
    check_range(f"{prefix}min_p", fields.min_p, 0.0, 1.0)
    # vLLM switches top_k off with -1 or 0.
    check_range(f"{prefix}top_k", fields.top_k, -1, MAX_TOP_K)
    check_repetition_penalty(f"{prefix}repetition_penalty", fields.repetition_penalty)
    check_range(f"{prefix}frequency_penalty", fields.frequency_penalty, -2.0, 2.0)
    check_range(f"{prefix}presence_penalty", fields.presence_penalty, -2.0, 2.0)
    if fields.typical_p is not None and not 0 < fields.typical_p <= 1:
        raise NotAProbabilityError(f"{prefix}typical_p", fields.typical_p)
    check_range(f"{prefix}repeat_last_n", fields.repeat_last_n, -1, MAX_WINDOW)
    check_range(f"{prefix}dry_multiplier", fields.dry_multiplier, 0.0, MAX_DRY)
    check_range(f"{prefix}dry_base", fields.dry_base, 1.0, MAX_DRY)
    check_range(f"{prefix}dry_allowed_length", fields.dry_allowed_length, 0, MAX_WINDOW)
    check_range(f"{prefix}dry_penalty_last_n", fields.dry_penalty_last_n, -1, MAX_WINDOW)
    check_range(f"{prefix}xtc_probability", fields.xtc_probability, 0.0, 1.0)
    check_range(f"{prefix}xtc_threshold", fields.xtc_threshold, 0.0, 1.0)
    if fields.mirostat:
        raise UnsupportedFieldError(f"{prefix}mirostat", "set it to 0", fields.mirostat)
    check_range(f"{prefix}seed", fields.seed, MIN_SEED, MAX_SEED)


def biases_of(logit_bias: Mapping[str, float] | None, limits: Limits, model: ModelFacts) -> Biases:
    """Return pairs of token id and the bias added to its logit. Raises ValidationError."""
    if logit_bias is None:
        return ()
    if len(logit_bias) > limits.max_logit_biases:
        raise TooManyBiasesError(limits.max_logit_biases, len(logit_bias))
    biases = []
    for key, bias in logit_bias.items():
        if not _TOKEN_ID.fullmatch(key) or (token_id := int(key)) >= model.vocabulary_size:
            raise BiasedTokenError(model.vocabulary_size, key)
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
    seed = draw_seed() if request.seed is None else request.seed
    own: Sequence[SamplingFields] = request.choice_parameters or [SamplingFields()] * candidates
    samplings = []
    for index, choice in enumerate(own):
        fields = _merged(request, choice)
        temperature = effective_temperature(1.0 if fields.temperature is None else fields.temperature)
        # Signed seeds are read as the same 64 bits, unsigned.
        drawn_from = choice_seed(seed & MAX_SEED, index) if choice.seed is None else choice.seed & MAX_SEED
        samplings.append(
            SamplingParams(
                temperature=temperature,
                top_k=min(max(fields.top_k or 0, 0), model.vocabulary_size),
                top_p=1.0 if fields.top_p is None else fields.top_p,
                min_p=fields.min_p or 0.0,
                repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
                frequency_penalty=fields.frequency_penalty or 0.0,
                presence_penalty=fields.presence_penalty or 0.0,
                seed=drawn_from if temperature > 0 else 0,
                logprobs=alternatives is not None,
                top_n_tokens=alternatives or 0,
                biases=biases,
                **_llama_server_params(fields),
            )
        )
    return samplings


def _llama_server_params(fields: SamplingFields) -> dict[str, Any]:
    """Return the parameters that have llama-server's names, as far as they are set."""
    given = {name: value for name in _LLAMA_SERVER if (value := getattr(fields, name)) is not None}
    # llama-server's -1 stands for all tokens.
    return {name: None if name.endswith("_last_n") and value == -1 else value for name, value in given.items()}


def _merged(request: SamplingFields, choice: SamplingFields) -> SamplingFields:
    """Return the choice's fields, with the request's where the choice has none."""
    fields = SamplingFields.__struct_fields__
    own = {field: value for field in fields if (value := getattr(choice, field)) is not None}
    return SamplingFields(**({field: getattr(request, field) for field in fields} | own))
