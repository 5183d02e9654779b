"""How tokens are chosen: every parameter with its default and its range."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeAlias

_MAX_INT32 = 2**31 - 1
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The values from ``low`` to ``high`` that a parameter may have; with ``above_low``, ``low`` is none of them.

    ``least``: clients may send values from here on; those below ``low`` stand for ``instead``.
    ``used_with``: the parameter without which this one has no effect.
    """

    low: float
    high: float
    above_low: bool = False
    least: float | None = None
    instead: float | None = None
    used_with: str | None = None

    @property
    def lowest_sent(self) -> float:
        """The lowest value that a client may send."""
        return self.low if self.least is None else self.least

    def meant(self, sent: Any) -> Any:
        """Return the value for which ``sent``, which may be sent, stands."""
        return self.instead if sent < self.low else sent


def _row(default: float | None, low: float, high: float, **more: Any) -> Any:
    """Return the field of a parameter with this default and `Range`."""
    return field(default=default, metadata={"range": Range(low=low, high=high, **more)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen; a field at its default switches its part off.

    The order, of which a new parameter gets its place:

    1. The functions with the key ``processors`` change the logits (0: none), see `caravan_shard.sampling.processors`.
       They are those of the program in whose process router and shard are. Then ``biases`` are added: pairs of a token
       id, each once, and a value.
    2. Penalties, on the last ``repeat_last_n`` tokens of prompt and output (0: none; None: all). As in llama.cpp the
       window counts prompt and output. As in vLLM ``repetition_penalty`` applies to all tokens in it, while
       ``frequency_penalty`` and ``presence_penalty`` count those of the output alone.
    3. DRY, on the last ``dry_penalty_last_n`` tokens (0: none; None: all): see `caravan_shard.sampling.penalties`.
    4. The tokens that a constraint or ``min_tokens`` rule out are removed.
    5. A ``temperature`` of 0 chooses the most likely token. Otherwise the logits are divided by it, so that the filters
       see the distribution that is drawn from, as in TGI and vLLM.
    6. The filters top_n_sigma, top_k, typical_p, top_p and min_p, each on what the one before left.
    7. XTC, the last filter as in llama-server: with probability ``xtc_probability``, of the tokens that are at least
       ``xtc_threshold`` likely, only the least likely is kept.
    8. The draw with the number of (seed, position): a plain one, or mirostat or adaptive-p on what is left, see
       `caravan_shard.sampling.feedback`.

    ``samplers`` has the names of all `SAMPLERS`, each once, in another order for 2, 3 and 5 to 7; empty for this one.
    With a ``dynatemp_range``, which makes the temperature depend on the candidates that are left (see
    `caravan_shard.sampling.order`), with ``mirostat`` and with an ``adaptive_target``, the order is
    llama-server's unless one is given: the temperature is last.

    ``logprobs``: each token has its log probability, and the ``top_n_tokens`` likeliest beside it; with
    ``score_token_ids`` those tokens in their order instead, however likely they are.
    """

    temperature: float = _row(1.0, 0.0, 100.0)
    top_k: int = _row(0, 0, _MAX_INT32, least=-1, instead=0)
    top_p: float = _row(1.0, 0.0, 1.0, above_low=True)
    typical_p: float = _row(1.0, 0.0, 1.0, above_low=True)
    min_p: float = _row(0.0, 0.0, 1.0)
    repetition_penalty: float = _row(1.0, 0.01, 100.0)
    frequency_penalty: float = _row(0.0, -2.0, 2.0)
    presence_penalty: float = _row(0.0, -2.0, 2.0)
    # Signed seeds are read as the same 64 bits, unsigned.
    seed: int = _row(0, 0, MAX_SEED, least=-(2**63))
    logprobs: bool = False
    top_n_tokens: int = 0
    score_token_ids: tuple[int, ...] = ()
    biases: tuple[tuple[int, float], ...] = ()
    repeat_last_n: int | None = _row(None, 0, _MAX_INT32, least=-1)
    dry_multiplier: float = _row(0.0, 0.0, 100.0)
    dry_base: float = _row(1.75, 1.0, 100.0, used_with="dry_multiplier")
    dry_allowed_length: int = _row(2, 0, _MAX_INT32, used_with="dry_multiplier")
    dry_penalty_last_n: int | None = _row(64, 0, _MAX_INT32, least=-1, used_with="dry_multiplier")
    xtc_probability: float = _row(0.0, 0.0, 1.0)
    xtc_threshold: float = _row(0.1, 0.0, 1.0)
    top_n_sigma: float = _row(0.0, 0.0, 100.0, least=-1.0, instead=0.0)
    dynatemp_range: float = _row(0.0, 0.0, 100.0)
    dynatemp_exponent: float = _row(1.0, 0.0, 100.0, used_with="dynatemp_range")
    samplers: tuple[str, ...] = ()
    processors: int = 0
    mirostat: int = _row(0, 0, 2)
    # Mirostat's target in bits and its rate, and the most that adaptive-p keeps of its mean with each token.
    mirostat_tau: float = _row(5.0, 0.0, 100.0, used_with="mirostat")
    mirostat_eta: float = _row(0.1, 0.0, 100.0, used_with="mirostat")
    adaptive_target: float | None = _row(None, 0.0, 1.0, least=-1.0)
    adaptive_decay: float = _row(0.9, 0.0, 0.99, used_with="adaptive_target")

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn: the most likely token is chosen, whatever the filters and the seed are."""
        return self.temperature == 0.0 and self.dynatemp_range == 0.0

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the samplers in their order; empty for the default order."""
        if self.samplers or (self.dynatemp_range == 0.0 and not self.mirostat and self.adaptive_target is None):
            return self.samplers
        return SAMPLERS

    @property
    def has_feedback(self) -> bool:
        """Whether a value is carried from token to token."""
        return self.mirostat > 0 or self.adaptive_target is not None

    @property
    def filters(self) -> bool:
        """Whether a filter may take candidates away."""
        return (
            self.top_k > 0
            or self.typical_p < 1.0
            or self.top_p < 1.0
            or self.min_p > 0.0
            or self.xtc_probability > 0.0
            or self.top_n_sigma > 0.0
        )


RANGES: Mapping[str, Range] = MappingProxyType(
    {parameter.name: parameter.metadata["range"] for parameter in fields(SamplingParams) if parameter.metadata}
)
DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {parameter.name: parameter.default for parameter in fields(SamplingParams)}
)

# What requests that do not say it get, by the field's name: a parameter of `RANGES` or `MAX_TOKENS`. Values are those
# that a client may send.
RequestDefaults: TypeAlias = tuple[tuple[str, float], ...]
MAX_TOKENS = "max_tokens"
_WHOLE = frozenset({MAX_TOKENS, "repeat_last_n", *(name for name, default in DEFAULTS.items() if type(default) is int)})
# llama.cpp's, where a file or an operator gives a penalty.
_PENALTY_LAST_N = 64

# The parameters that each sampler applies, by llama-server's names: it is off while they have their defaults. The
# samplers have the default order.
SAMPLER_PARAMETERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "penalties": ("repetition_penalty", "presence_penalty", "frequency_penalty"),
        "dry": ("dry_multiplier",),
        "temperature": ("temperature", "dynatemp_range"),
        "top_n_sigma": ("top_n_sigma",),
        "top_k": ("top_k",),
        "typ_p": ("typical_p",),
        "top_p": ("top_p",),
        "min_p": ("min_p",),
        "xtc": ("xtc_probability",),
    }
)
# The samplers that a request may put in order, in llama-server's order.
SAMPLERS = (*(name for name in SAMPLER_PARAMETERS if name != "temperature"), "temperature")


def switched_off(samplers: Iterable[str]) -> dict[str, Any]:
    """Return the parameters that switch off the samplers of these names, with their values."""
    return {name: DEFAULTS[name] for sampler in samplers for name in SAMPLER_PARAMETERS[sampler]}


def valid_defaults(values: Mapping[str, float]) -> RequestDefaults:
    """Return those of ``values`` that requests could send, by name, whole numbers as such.

    A ``repetition_penalty`` without ``repeat_last_n`` counts the last 64 tokens, as in llama.cpp.
    """
    found = {name: int(value) if name in _WHOLE else value for name, value in values.items() if _may_be(name, value)}
    if "repetition_penalty" in found:
        found.setdefault("repeat_last_n", _PENALTY_LAST_N)
    return tuple(sorted(found.items()))


def _may_be(name: str, value: float) -> bool:
    if name == MAX_TOKENS:
        return 1 <= value <= _MAX_INT32
    allowed = RANGES.get(name)
    if allowed is None or name == "seed" or not allowed.lowest_sent <= value <= allowed.high:
        return False
    return (value > allowed.low or not allowed.above_low) and (name not in _WHOLE or value == int(value))


def defaults_for(given: Mapping[str, Any], defaults: RequestDefaults) -> dict[str, float]:
    """Return the parameters of ``defaults`` that a request gets that sets those of ``given``; None sets nothing.

    With mirostat, which decides how many tokens are likely enough, filters have no defaults. The penalty that a request
    sets has the window that it sets, or all tokens.
    """
    asked = {name for name, value in given.items() if value is not None}
    found = {name: value for name, value in defaults if name not in asked and name != MAX_TOKENS}
    if given.get("mirostat") if "mirostat" in asked else found.get("mirostat"):
        for name in _FILTERS:
            found.pop(name, None)
    if "repetition_penalty" in asked:
        found.pop("repeat_last_n", None)
    return found


_FILTERS = tuple(
    parameter
    for name, own in SAMPLER_PARAMETERS.items()
    if name not in {"penalties", "dry", "temperature"}
    for parameter in own
)
