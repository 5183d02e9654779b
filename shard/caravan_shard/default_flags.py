"""The shard's flags for what requests get that do not say it. They have llama-server's names."""

from collections.abc import Callable
from dataclasses import dataclass

from caravan_models.gguf_facts import RECOMMENDED
from caravan_proto.flags import flag
from caravan_proto.messages.sampling import RANGES, RequestDefaults, valid_defaults

# By flag, the field of a request.
_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "max_tokens": "max_tokens",
}
_TOP_K, _PENALTY = RANGES["top_k"], RANGES["repetition_penalty"]


@dataclass(frozen=True, kw_only=True)
class DefaultFlags:
    """Flags of `ShardConfig`."""

    temp: float | None = flag(
        None, "temperature of requests that set none [as the file says, else the API]", low=0, high=100
    )
    top_k: int | None = flag(None, "the same for top_k; 0: off", low=-1, high=_TOP_K.high)
    top_p: float | None = flag(None, "the same for top_p; 1: off", low=1e-6, high=1)
    min_p: float | None = flag(None, "the same for min_p; 0: off", low=0, high=1)
    repeat_penalty: float | None = flag(
        None,
        "the same for the repetition penalty, which counts the last 64 tokens; 1: off",
        low=_PENALTY.low,
        high=_PENALTY.high,
    )
    max_tokens: int | None = flag(
        None,
        "maximum number of new tokens of requests that set none [16 for /v1/completions, else all that fit]",
        "-n",
        "--n-predict",
        low=1,
        high=2**31 - 1,
    )

    def request_defaults(self, read: Callable[[str], float | None]) -> RequestDefaults:
        """Return what requests get that do not say it: by these flags, else as the model's file recommends it.

        ``read`` returns the value of a GGUF key; None if the file has none.
        """
        recommended = {field: read(key) for key, field in RECOMMENDED.items()}
        flags = {field: getattr(self, name) for name, field in _FIELDS.items()}
        found = {**recommended, **{field: value for field, value in flags.items() if value is not None}}
        return valid_defaults({field: value for field, value in found.items() if value is not None})
