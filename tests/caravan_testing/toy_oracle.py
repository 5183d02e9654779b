"""What the toy model must answer to a prompt, and the log probabilities it must give the prompt's tokens."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caravan_shard.backends.toy.cache import EMPTY_STATE, next_state
from caravan_shard.backends.toy.model import TOY_FACTS, toy_logits
from caravan_shard.constraints.grammar import Grammar
from caravan_shard.constraints.matching import Matching
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.parameters import SamplingParameters
from caravan_shard.sampling.penalties import PenaltyCounts
from caravan_shard.sampling.sampler import Choice, choose_token


def expected_logprobs(prompt: Sequence[int], adapter: str = "") -> list[NDArray[np.float64]]:
    """[vocabulary] before each token but the first."""
    state, rows = EMPTY_STATE, []
    for position, token in enumerate(prompt[:-1]):
        state = next_state(state, token, position, adapter)
        logits = toy_logits(np.array([state], np.uint64))[0].astype(np.float64)
        rows.append(logits - np.log(np.exp(logits).sum()))
    return rows


def expected_output(
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    sampling: SamplingParameters | None = None,
    ignore_eos: bool = False,
    earlier_output: Sequence[int] = (),
    adapter: str = "",
    grammar: Grammar | None = None,
) -> list[int]:
    """What the toy model answers to ``prompt``, its end token included: on one shard or several, alone or in company.

    ``earlier_output`` are tokens that an interrupted sequence had already; the result goes on after them, and
    ``max_new_tokens`` counts the result alone.
    """
    parameters = sampling or SamplingParameters()
    tokens = [*prompt, *earlier_output]
    penalties = PenaltyCounts() if parameters.penalizes else None
    if penalties is not None:
        penalties.add(prompt, output=False)
        penalties.add(earlier_output, output=True)
    matching = None if grammar is None else Matching(grammar, ignore_eos=ignore_eos)
    state = EMPTY_STATE
    for position, token in enumerate(tokens):
        state = next_state(state, token, position, adapter)
    output: list[int] = []
    while len(output) < max_new_tokens:
        position = len(tokens) + len(output)
        logits = toy_logits(np.array([state], np.uint64))[0]
        if matching is not None:
            matching.find(earlier_output)
        allowed = None if matching is None else matching.allowed
        token = choose_token(logits, Choice(parameters, position, penalties, allowed), filter_candidates)
        output.append(token)
        if token in TOY_FACTS.eog_ids and not (ignore_eos and matching is None):
            break
        if matching is not None:
            matching.advance(token)
            if matching.ended:
                break
        if penalties is not None:
            penalties.add([token], output=True)
        state = next_state(state, token, position, adapter)
    return output
