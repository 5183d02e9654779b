"""TGI's response headers: how long a request took, by stage. Every dialect sends them."""

from collections.abc import Sequence

from caravan_dialects.api.generation.run import Run, ValidRequest
from caravan_router.http.server.state import AppState


def compute_headers(state: AppState, characters: int) -> dict[str, str]:
    """Return the headers that are known before the first token."""
    return {"x-compute-type": state.info.compute_type, "x-compute-characters": str(characters)}


def timing_headers(state: AppState, requests: Sequence[ValidRequest], runs: Sequence[Run]) -> dict[str, str]:
    """Return the headers of a reply that is sent whole.

    Times are sums over ``runs``; each prompt of ``requests`` counts once. x-compute-time is in seconds, the others in
    milliseconds.
    """
    timings = [run.timings() for run in runs]
    tokens = sum(run.tokens for run in runs)
    total = sum(timing.total_s for timing in timings)
    inference = sum(timing.inference_s for timing in timings)
    return {
        **compute_headers(state, sum(request.characters for request in requests)),
        "x-compute-time": f"{total:.6f}",
        "x-total-time": _milliseconds(total),
        "x-validation-time": _milliseconds(sum(timing.validation_s for timing in timings)),
        "x-queue-time": _milliseconds(sum(timing.queue_s for timing in timings)),
        "x-inference-time": _milliseconds(inference),
        "x-time-per-token": _milliseconds(inference / max(1, tokens)),
        "x-prompt-tokens": str(sum(len(request.prompt) for request in requests)),
        "x-generated-tokens": str(tokens),
    }


def _milliseconds(seconds: float) -> str:
    return str(int(seconds * 1000))
