"""How a generation samples and stops: vLLM's ``SamplingParams``, with Caravan's additions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypedDict

from caravan.errors import RequestError
from caravan.options import NamedFields
from caravan.reprs import short_repr


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams(NamedFields):
    """A constraint on the output, in vLLM's form; exactly one field is set.

    ``json``: a JSON schema, as an object or as JSON text. ``json_object``: any JSON object. ``regex``: a regular
    expression in Rust's syntax. ``choice``: the output is one of these texts. ``grammar``: GBNF if a line has ``::=``,
    else llguidance's dialect of Lark.
    """

    json: Mapping[str, Any] | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    __repr__ = short_repr


# Takes the ids of the output so far and the logits, float32 [vocabulary], which it may change; returns logits.
LogitsProcessor = Callable[[list[int], Any], Any]


class ChoiceParameters(TypedDict, total=False):
    """What only one of several outputs of a prompt has; the fields mean what those of `SamplingParams` mean."""

    temperature: float
    top_p: float
    seed: int
    frequency_penalty: float
    presence_penalty: float
    top_k: int
    min_p: float
    repetition_penalty: float
    typical_p: float
    repeat_last_n: int
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    xtc_probability: float
    xtc_threshold: float
    top_n_sigma: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    adaptive_target: float
    adaptive_decay: float
    samplers: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(NamedFields):
    """How tokens are chosen and when an output ends. Names and meaning are vLLM's.

    A sampling parameter that is None is what the model's options or its file say, else vLLM's default: 1 for
    ``temperature``, and off for the others.

    ``max_tokens``: None for all that fit in the context, or the number that the model's options say. ``seed``: equal
    seeds sample equal tokens; None: a new one. ``logprobs``, ``prompt_logprobs``: how many alternatives each token has
    beside its own log probability; None for no log probabilities. ``n``: outputs for each prompt, which share the
    computation of the prompt. ``top_k``: 0 or -1 for all tokens.

    The fields from ``typical_p`` on are Caravan's, as in its HTTP API: llama-server's samplers, and in ``samplers`` the
    names of those that are used, in their order; ``use_beam_search`` with ``n`` as the width of the search,
    ``priority`` (-100 to 100, higher goes first), ``timeout`` in seconds from submission to the last token,
    ``speculate`` (most draft tokens in a step, at most those of the model), and ``cache_salt``: generations share
    computed prefixes only with the same salt. ``best_of``: how many outputs are generated for each prompt. The
    ``n`` best are returned, by the mean log probability of their tokens; a stream cannot have more than ``n``.
    ``choice_parameters`` has an entry for each of ``n`` or ``best_of`` outputs, which overrides the fields that it
    sets; ``n`` may then be left out.

    ``logits_processors``: functions of the program that change the logits before everything else, in this process only.
    Each gets the ids of the output so far and the logits, a new float32 array [vocabulary], and returns logits.
    They run on the model's thread, which waits for them, and must not use the model. An output may be computed in parts
    that are interrupted, and a function is not called again for tokens that are there: its result may depend on its
    arguments alone.

    Raises RequestError if a value breaks a rule that needs no model, and TypeError for an unknown field.
    """

    n: int = 1
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = field(default=None)
    typical_p: float | None = None
    repeat_last_n: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    adaptive_target: float | None = None
    adaptive_decay: float | None = None
    samplers: Sequence[str] | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: int | None = None
    timeout: float | None = None
    speculate: int | None = None
    cache_salt: str | None = None
    best_of: int | None = None
    choice_parameters: Sequence[ChoiceParameters] | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        """Raise RequestError if a value breaks a rule that needs no model."""
        if self.max_tokens is not None and (type(self.max_tokens) is not int or self.max_tokens < 1):
            raise RequestError(f"`max_tokens` must be a whole number >= 1, or None. Given: {self.max_tokens!r}")
        changed = {field.name for field in fields(self) if getattr(self, field.name) != field.default}
        if changed - {"max_tokens"}:
            # Imported here: it needs the rules of the HTTP API, which importing the package does not.
            from caravan.valid_params import check_params

            check_params(self)
