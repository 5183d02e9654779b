"""Logits processors of one request: registered with the shard of this process while the request runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from caravan import errors
from caravan.sampling_params import SamplingParams
from caravan_dialects.api.generation.request import ValidRequest
from caravan_shard.sampling.processors import ProcessorRegistry


@contextmanager
def processing(
    registry: ProcessorRegistry, request: ValidRequest, params: SamplingParams
) -> Iterator[tuple[ValidRequest, Callable[[], None]]]:
    """Yield the request as it is to run, and what raises LogitsProcessorError once a function has failed.

    A token that was chosen without the functions comes after that: call it before a token is used.
    """
    if not params.logits_processors:
        yield request, _nothing
        return
    with registry.registered(params.logits_processors) as (key, processors):

        def check() -> None:
            if processors.error is not None:
                raise processor_error(processors.error)

        specs = tuple(replace(spec, sampling=replace(spec.sampling, processors=key)) for spec in request.specs)
        yield replace(request, specs=specs), check


def processor_error(error: BaseException) -> errors.LogitsProcessorError:
    """Return the error of a request of which a function has raised ``error``."""
    made = errors.LogitsProcessorError(f"a logits processor failed: {type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def _nothing() -> None:
    pass
