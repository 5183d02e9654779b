"""TGI's rules, in TGI's order."""

from dataclasses import replace

from caravan_router.core.engine import Engine, ModelFacts, TokenizedText
from caravan_router.core.sampling import SamplingParams, StoppingParams
from caravan_router.http.generation.adapters import adapter_of_id
from caravan_router.http.generation.bounds import Bounds, bounds_of, model_of
from caravan_router.http.generation.candidates import check_candidates
from caravan_router.http.generation.checks import (
    MAX_TOP_K,
    check_new_tokens,
    check_positive,
    check_range,
    check_repetition_penalty,
    check_stops,
    check_temperature,
    effective_temperature,
    fit,
    tokenize_prompt,
)
from caravan_router.http.generation.constraints import compiled, constraint_of_format
from caravan_router.http.generation.request import ValidRequest
from caravan_router.http.generation.rules import (
    BestOfDisabledError,
    BestOfStreamingError,
    BestOfWithoutSamplingError,
    BestOfWithSeedError,
    NotBetweenZeroAndOneError,
    NotStrictlyPositiveError,
    PrefillDetailsStreamError,
    TruncateError,
    UnsupportedFieldError,
)
from caravan_router.http.generation.seeds import MAX_SEED, choice_seed, draw_seed
from caravan_router.http.generation.serving import Extras, Serving
from caravan_router.http.limits import Limits
from caravan_router.http.tgi.schema import CompatGenerateRequest, GenerateParameters, GenerateRequest
from caravan_router.text.prompt_text import as_decoded

# TGI's trap: without ``parameters`` a request samples, with them it is greedy unless it says otherwise.
WITHOUT_PARAMETERS = GenerateParameters(do_sample=True)


def candidates_of(parameters: GenerateParameters | None, limits: Limits) -> int:
    """Permits to take before anything is checked; of a ``best_of`` that will be refused, one."""
    best_of = 1 if parameters is None or parameters.best_of is None else parameters.best_of
    return best_of if 1 <= best_of <= limits.max_best_of else 1


async def validate_generate(
    engine: Engine, limits: Limits, request: GenerateRequest | CompatGenerateRequest, serving: Serving, *, stream: bool
) -> ValidRequest:
    """Raises ValidationError (one class a rule), NoShardError, TextTooLongError."""
    parameters = WITHOUT_PARAMETERS if request.parameters is None else request.parameters
    model = model_of(engine)
    bounds = bounds_of(limits, model)
    if stream:
        _check_streamed(parameters)
    _check_best_of(parameters, limits)
    _check_sampling(parameters)
    check_positive("max_new_tokens", parameters.max_new_tokens)
    stops = check_stops(parameters.stop or (), limits)
    if parameters.seed is not None and parameters.best_of not in {None, 1}:
        raise BestOfWithSeedError(parameters.seed)
    check_range("seed", parameters.seed, 0, MAX_SEED)
    check_range("top_n_tokens", parameters.top_n_tokens, 0, bounds.max_top_n_tokens)
    if parameters.watermark:
        raise UnsupportedFieldError("watermark", "set it to false", parameters.watermark)
    adapter = adapter_of_id(parameters.adapter_id, model)
    tokens = await _prompt(engine, request.inputs, parameters.truncate, bounds)
    max_new = fit(tokens.token_ids, parameters.max_new_tokens, bounds, ("inputs", "max_new_tokens"))
    check_new_tokens("max_new_tokens", parameters.best_of or 1, max_new, bounds)
    constraint = await compiled(engine, constraint_of_format("grammar", parameters.grammar, limits))
    extras = Extras(constraint=constraint, adapter=adapter)
    stopping = StoppingParams(max_new_tokens=max_new)
    scores = bool(parameters.decoder_input_details)
    return ValidRequest(
        specs=tuple(
            # Once for all candidates.
            serving.spec(
                tokens.token_ids, sampling, stopping, replace(extras, prompt_logprobs=scores and candidate == 0)
            )
            for candidate, sampling in enumerate(_samplings(parameters, model, stream=stream))
        ),
        stops=stops,
        characters=len(request.inputs),
        prompt_text=as_decoded(tokens) if scores else None,
    )


def _samplings(parameters: GenerateParameters, model: ModelFacts, *, stream: bool) -> list[SamplingParams]:
    """One for each candidate."""
    best_of = parameters.best_of or 1
    greedy = SamplingParams(
        temperature=0.0,
        top_k=min(parameters.top_k or 0, model.vocabulary_size),
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        typical_p=1.0 if parameters.typical_p is None else parameters.typical_p,
        repetition_penalty=1.0 if parameters.repetition_penalty is None else parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        # A stream's events always carry the logprob; a whole reply has none to show without details, but may rank.
        logprobs=stream or wants_details(parameters) or best_of > 1,
        top_n_tokens=(parameters.top_n_tokens or 0) if stream or wants_details(parameters) else 0,
    )
    temperature = effective_temperature(1.0 if parameters.temperature is None else parameters.temperature)
    if not _samples(parameters) or temperature == 0:
        return [greedy] * best_of
    seed = draw_seed() if parameters.seed is None else parameters.seed
    return [replace(greedy, temperature=temperature, seed=choice_seed(seed, index)) for index in range(best_of)]


def _samples(parameters: GenerateParameters) -> bool:
    return (
        bool(parameters.do_sample)
        or parameters.temperature not in {None, 1.0}
        or parameters.top_k is not None
        or parameters.top_p is not None
        or parameters.typical_p is not None
    )


def _check_streamed(parameters: GenerateParameters) -> None:
    if parameters.best_of not in {None, 1}:
        raise BestOfStreamingError(parameters.best_of)
    if parameters.decoder_input_details:
        raise PrefillDetailsStreamError


def _check_best_of(parameters: GenerateParameters, limits: Limits) -> None:
    best_of = 1 if parameters.best_of is None else parameters.best_of
    if best_of == 1:
        return
    if limits.max_best_of == 1:
        raise BestOfDisabledError(best_of)
    check_candidates("best_of", best_of, limits)
    if not _samples(parameters):
        raise BestOfWithoutSamplingError(best_of)


def _check_sampling(parameters: GenerateParameters) -> None:
    check_temperature("temperature", parameters.temperature, zero_allowed=False)
    check_repetition_penalty("repetition_penalty", parameters.repetition_penalty)
    check_range("frequency_penalty", parameters.frequency_penalty, -2.0, 2.0)
    for field, value in (("top_p", parameters.top_p), ("typical_p", parameters.typical_p)):
        if value is not None and not 0 < value < 1:
            raise NotBetweenZeroAndOneError(field, value)
    if parameters.top_k is not None and parameters.top_k <= 0:
        raise NotStrictlyPositiveError("top_k", parameters.top_k)
    check_range("top_k", parameters.top_k, 1, MAX_TOP_K)


def wants_details(parameters: GenerateParameters) -> bool:
    """Those of the prompt are among them."""
    return bool(parameters.details or parameters.decoder_input_details)


async def _prompt(engine: Engine, text: str, truncate: int | None, bounds: Bounds) -> TokenizedText:
    if text and truncate is not None and not 0 < truncate <= bounds.max_input_tokens:
        raise TruncateError(bounds.max_input_tokens, truncate)
    tokens = await tokenize_prompt(engine, "inputs", text, bounds)
    if truncate is None:
        return tokens
    return TokenizedText(tokens.token_ids[-truncate:], tokens.pieces[-truncate:], tokens.specials[-truncate:])
