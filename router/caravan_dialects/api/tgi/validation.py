"""TGI's rules for ``/generate``, in TGI's order."""

import re
from dataclasses import replace

from caravan_dialects.api.generation.checks import (
    RANDOM_SEED,
    check_candidates,
    check_positive,
    check_range,
    check_sampled,
    check_stops,
    choice_seed,
    draw_seed,
    effective_temperature,
)
from caravan_dialects.api.generation.constraints import ConstraintReader, compiled
from caravan_dialects.api.generation.context import Context
from caravan_dialects.api.generation.parts import MediaParts
from caravan_dialects.api.generation.prompt import Truncation, check_new_tokens, fit, tokenize_mixed, tokenize_truncated
from caravan_dialects.api.generation.rules import (
    not_between_zero_and_one_error,
    unsupported_field_error,
)
from caravan_dialects.api.generation.run import ValidRequest
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.tgi.rules import (
    best_of_disabled_error,
    best_of_streaming_error,
    best_of_with_seed_error,
    best_of_without_sampling_error,
    prefill_details_stream_error,
    truncate_error,
    unknown_adapter_error,
)
from caravan_dialects.api.tgi.schema import CompatGenerateRequest, GenerateParameters, GenerateRequest
from caravan_dialects.text.assembler import TextOptions
from caravan_dialects.text.detokenize import as_decoded
from caravan_proto.messages.sampling import MAX_SEED, RANGES, SamplingParams
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.generation import GenerationSpec, StoppingParams
from caravan_scheduler.core.prompt_media import MediaTokens

_PICTURE = re.compile(r"!\[\]\(([^)]*)\)")
# TGI's own limit, which its clients know of.
MAX_STOPS = 4
# As in TGI, a request without ``parameters`` samples; a request with them is greedy unless they enable sampling.
_NO_PARAMETERS = GenerateParameters(do_sample=True)


def with_pictures(text: str, media: MediaParts) -> str:
    """Return ``text`` with marks for its pictures, if the model sees. Raises ValidationError."""
    if not media.sees:
        return text
    return _PICTURE.sub(lambda found: media.picture_at("inputs", found[1]), text)


def parameters_of(body: GenerateRequest | CompatGenerateRequest) -> GenerateParameters:
    """Return the body's parameters, or what TGI assumes without any."""
    return _NO_PARAMETERS if body.parameters is None else body.parameters


def candidates_of(parameters: GenerateParameters, limits: Limits) -> int:
    """Return the number of permits to take before validation: ``best_of``, or 1 if it is out of range."""
    best_of = 1 if parameters.best_of is None else parameters.best_of
    return best_of if 1 <= best_of <= limits.max_best_of else 1


def wants_details(parameters: GenerateParameters) -> bool:
    """Return whether the reply has details; details of the prompt imply them."""
    return bool(parameters.details or parameters.decoder_input_details)


async def validate_generate(
    context: Context, body: GenerateRequest | CompatGenerateRequest, *, stream: bool
) -> ValidRequest:
    """Check sampling, then the prompt, then the constraint. Raises ValidationError, NoShardError, TextTooLongError."""
    parameters, limits, model, bounds = parameters_of(body), context.limits, context.model, context.bounds
    serving = context.serving(body)
    if stream:
        _check_streamed(parameters)
    _check_best_of(parameters, limits)
    _check_sampling(parameters)
    check_positive("max_new_tokens", parameters.max_new_tokens)
    stops = check_stops(parameters.stop or (), limits, MAX_STOPS)
    seed = None if parameters.seed == RANDOM_SEED else parameters.seed
    if seed is not None and parameters.best_of not in {None, 1}:
        raise best_of_with_seed_error(seed)
    check_range("seed", seed, 0, MAX_SEED)
    check_range("top_n_tokens", parameters.top_n_tokens, 0, bounds.max_top_n_tokens)
    if parameters.watermark:
        raise unsupported_field_error("watermark", "set it to false", parameters.watermark)
    adapter = model.adapter_key(_adapter(parameters.adapter_id, model) or context.adapter)
    media = MediaParts(context.model.media)
    inputs = with_pictures(body.inputs, media)
    prompt = await _prompt(context, inputs, media, parameters.truncate)
    tokens = prompt.tokens
    max_new = fit(tokens.token_ids, parameters.max_new_tokens, bounds, ("inputs", "max_new_tokens"))
    check_new_tokens("max_new_tokens", parameters.best_of or 1, max_new, bounds)
    check_range("min_new_tokens", parameters.min_new_tokens, 0, max_new)
    min_new = parameters.min_new_tokens or 0
    stopping = StoppingParams(max_new_tokens=max_new, min_tokens=min_new)
    asked = ConstraintReader(limits).response_format("grammar", parameters.grammar)
    constraint = await compiled(context.engine, asked)
    prompt_logprobs = bool(parameters.decoder_input_details)
    return ValidRequest(
        specs=tuple(
            # The first candidate computes the prompt's logprobs for all.
            GenerationSpec(
                prompt=tokens.token_ids,
                sampling=sampling,
                stopping=stopping,
                media=prompt.media,
                constraint=constraint,
                adapter=adapter,
                prompt_logprobs=prompt_logprobs and index == 0,
                **serving,
            )
            for index, sampling in enumerate(_samplings(parameters, model, stream=stream))
        ),
        text=TextOptions(stops=stops, min_tokens=min_new),
        characters=len(media.without_marks(inputs)),
        prompt_text=as_decoded(tokens) if prompt_logprobs else None,
    )


def _samplings(parameters: GenerateParameters, model: ModelFacts, *, stream: bool) -> list[SamplingParams]:
    """Return one entry for each candidate."""
    best_of = parameters.best_of or 1
    details = wants_details(parameters)
    greedy = SamplingParams(
        temperature=0.0,
        top_k=min(parameters.top_k or 0, model.vocabulary_size),
        top_p=1.0 if parameters.top_p is None else parameters.top_p,
        typical_p=1.0 if parameters.typical_p is None else parameters.typical_p,
        repetition_penalty=1.0 if parameters.repetition_penalty is None else parameters.repetition_penalty,
        frequency_penalty=parameters.frequency_penalty or 0.0,
        # Every event of a stream shows a logprob; a whole reply shows them with details, and ranking needs them.
        logprobs=stream or details or best_of > 1,
        top_n_tokens=(parameters.top_n_tokens or 0) if stream or details else 0,
    )
    temperature = effective_temperature(1.0 if parameters.temperature is None else parameters.temperature)
    if not _samples(parameters) or temperature == 0:
        return [greedy] * best_of
    seed = draw_seed() if parameters.seed in {None, RANDOM_SEED} else parameters.seed
    assert seed is not None
    return [replace(greedy, temperature=temperature, seed=choice_seed(seed, index)) for index in range(best_of)]


def _samples(parameters: GenerateParameters) -> bool:
    """Return whether tokens are drawn: TGI does if asked to, or if any sampling parameter is set."""
    return (
        bool(parameters.do_sample)
        or parameters.temperature not in {None, 1.0}
        or parameters.top_k is not None
        or parameters.top_p is not None
        or parameters.typical_p is not None
    )


def _check_streamed(parameters: GenerateParameters) -> None:
    if parameters.best_of not in {None, 1}:
        raise best_of_streaming_error(parameters.best_of)
    if parameters.decoder_input_details:
        raise prefill_details_stream_error()


def _check_best_of(parameters: GenerateParameters, limits: Limits) -> None:
    best_of = 1 if parameters.best_of is None else parameters.best_of
    if best_of == 1:
        return
    if limits.max_best_of == 1:
        raise best_of_disabled_error(best_of)
    check_candidates("best_of", best_of, limits)
    if not _samples(parameters):
        raise best_of_without_sampling_error(best_of)


def _check_sampling(parameters: GenerateParameters) -> None:
    check_positive("temperature", parameters.temperature)
    for name in ("temperature", "repetition_penalty", "frequency_penalty"):
        check_sampled(name, getattr(parameters, name))
    for field, value in (("top_p", parameters.top_p), ("typical_p", parameters.typical_p)):
        if value is not None and not 0 < value < 1:
            raise not_between_zero_and_one_error(field, value)
    check_positive("top_k", parameters.top_k)
    check_range("top_k", parameters.top_k, 1, RANGES["top_k"].high)


def _adapter(adapter_id: str | None, model: ModelFacts) -> str:
    """Return the adapter's name, "" for none. TGI ignores an unknown one; here it is an error."""
    if adapter_id is None:
        return ""
    if adapter_id not in model.adapters:
        raise unknown_adapter_error("adapter_id", model.adapters, adapter_id)
    return adapter_id


async def _prompt(context: Context, text: str, media: MediaParts, truncate: int | None) -> MediaTokens:
    bounds = context.bounds
    if text and truncate is not None and not 0 < truncate <= bounds.max_input_tokens:
        raise truncate_error(bounds.max_input_tokens, truncate)
    if truncate is None:
        return await tokenize_mixed(context, "inputs", text, media)
    if media.files:
        raise unsupported_field_error("truncate", "send no images", truncate)
    truncation = Truncation(limit=truncate, keep_end=True)
    return MediaTokens(await tokenize_truncated(context.engine, "inputs", text, bounds, truncation), None)
