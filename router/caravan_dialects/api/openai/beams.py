"""Beam search, with the fields of vLLM and the meaning that Hugging Face's ``generate`` gives them."""

from collections.abc import Sequence
from dataclasses import replace

from caravan_dialects.api.generation.checks import check_range
from caravan_dialects.api.openai.rules import beam_field_error, needs_field_error
from caravan_dialects.api.openai.schema import GeneratingFields
from caravan_proto.messages.sampling import RANGES, SAMPLERS, switched_off
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.generation import BeamSearch, EarlyStopping, GenerationSpec

MAX_LENGTH_PENALTY = 10.0
# Fields that a search does not honour, each with the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "stream": (False,),
    "stop": ("", []),
    "min_tokens": (0,),
    "best_of": (),
    "echo": (False,),
    "prompt_logprobs": (),
    "prediction": (),
    "tools": ([],),
    "choice_parameters": (),
    "logit_bias": ({},),
    "seed": (),
    "samplers": (),
    "mirostat": (0,),
    "adaptive_target": (-1,),
    "response_format": (),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "grammar": ("",),
    "json_schema": (),
    "reasoning_budget_tokens": (0, -1),
    "thinking_budget_tokens": (0, -1),
    "thinking_token_budget": (0, -1),
    "reasoning_control": (False,),
    **{name: (neutral, RANGES[name].least) for name, neutral in switched_off(SAMPLERS).items()},
    "temperature": (0,),
}


def check_beams(fields: GeneratingFields, n: int, model: ModelFacts) -> None:
    """Check the fields of a beam search, and that no other field contradicts it. Raises ValidationError."""
    for name in ("length_penalty", "early_stopping"):
        if not fields.use_beam_search and (given := getattr(fields, name)) is not None:
            raise needs_field_error(name, "`use_beam_search` is true", given)
    if not fields.use_beam_search:
        return
    for name, neutral in _NEUTRAL.items():
        given = getattr(fields, name, None)
        if given is not None and given not in neutral:
            raise beam_field_error(name, given)
    check_range("length_penalty", fields.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
    # A step needs `n` tokens of each beam that end nothing.
    ends = len(fields.stop_token_ids or ()) + (0 if fields.ignore_eos else len(model.eos_token_ids))
    check_range("n", n, 1, max(1, min(model.max_top_n_tokens, model.vocabulary_size) - ends))


def with_beams(
    specs: Sequence[GenerationSpec], fields: GeneratingFields, model: ModelFacts
) -> tuple[GenerationSpec, ...]:
    """Return the generations of one prompt, as members of a beam search if `check_beams` found one."""
    if not fields.use_beam_search:
        return tuple(specs)
    early = EarlyStopping.NO if fields.early_stopping is None else EarlyStopping(fields.early_stopping)
    return tuple(
        replace(
            spec,
            sampling=replace(spec.sampling, temperature=0.0, seed=0),
            max_draft_tokens=0,
            beams=BeamSearch(
                width=len(specs),
                index=index,
                length_penalty=1.0 if fields.length_penalty is None else fields.length_penalty,
                early_stopping=early,
                eos_token_ids=model.eos_token_ids,
            ),
        )
        for index, spec in enumerate(specs)
    )
