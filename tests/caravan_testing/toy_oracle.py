"""The right outputs and prompt logprobs of the toy model, computed without a shard."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caravan_proto.messages.constraint import Thought
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.toy.model import EMPTY_STATE, TOY_FACTS, ToyVocabulary, next_state, toy_logits
from caravan_shard.constraints.grammar import Grammar
from caravan_shard.constraints.matching import Matching
from caravan_shard.sampling.choice import Allowed, Choice, choose_token
from caravan_shard.sampling.feedback import make_feedback
from caravan_shard.sampling.filters import filter_candidates
from caravan_shard.sampling.penalties import make_biases, make_penalties


def expected_logprobs(prompt: Sequence[int], adapter: str = "") -> list[NDArray[np.float64]]:
    """Return the log probabilities [vocabulary] before each token except the first."""
    state, rows = EMPTY_STATE, []
    for position, token in enumerate(prompt[:-1]):
        state = next_state(state, token, position, adapter)
        logits = toy_logits(np.array([state], np.uint64))[0].astype(np.float64)
        rows.append(logits - np.log(np.exp(logits).sum()))
    return rows


def logprobs_after(tokens: Sequence[int]) -> list[float]:
    """Return the logprob of each token of the vocabulary after ``tokens``."""
    state = EMPTY_STATE
    for position, token in enumerate(tokens):
        state = next_state(state, token, position, "")
    logits = toy_logits(np.array([state], np.uint64))[0].astype(np.float64)
    return [float(value) for value in logits - np.log(np.exp(logits).sum())]


def expected_output(
    prompt: Sequence[int],
    max_new_tokens: int,
    *,
    sampling: SamplingParams | None = None,
    ignore_eos: bool = False,
    stop_token_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    earlier_output: Sequence[int] = (),
    adapter: str = "",
    grammar: Grammar | None = None,
    thought: Thought | None = None,
) -> list[int]:
    """Return the output for ``prompt``, its end token included: the same on any shard and in any batch.

    ``earlier_output`` are tokens that an interrupted sequence had already. The result continues after them, and
    ``max_new_tokens`` counts the result alone.
    """
    parameters = sampling or SamplingParams(temperature=0.0)
    tokens = [*prompt, *earlier_output]
    penalties = make_penalties(parameters, lambda token: ToyVocabulary().piece(token).data)
    for penalty in penalties:
        penalty.add(prompt, output=False)
        penalty.add(earlier_output, output=True)
    assert not (earlier_output and parameters.has_feedback), "the feedback of an earlier output is not known"
    biases = make_biases(parameters.biases)
    feedback = make_feedback(parameters, TOY_FACTS.vocabulary_size, None)
    matching = None if grammar is None else Matching(grammar)
    state = EMPTY_STATE
    for position, token in enumerate(tokens):
        state = next_state(state, token, position, adapter)
    for _ in range(max_new_tokens):
        position = len(tokens)
        output = tokens[len(prompt) :]
        forced, answer = (None, output) if thought is None else _after_thought(thought, output)
        too_short = position - len(prompt) < min_tokens
        barred = TOY_FACTS.eos_token_ids if matching is not None and (ignore_eos or answer is None) else frozenset()
        if too_short:
            barred = TOY_FACTS.eos_token_ids | stop_token_ids
        logits = toy_logits(np.array([state], np.uint64))[0]
        allowed = None if forced is None else Allowed.of([forced])
        if matching is not None and answer is not None:
            matching.find(answer)  # only the first call reads it
            allowed = matching.allowed
        choice = Choice(parameters, position, penalties, allowed, barred, feedback=feedback, biases=biases)
        token = choose_token(logits, choice, filter_candidates)
        tokens.append(token)
        if token in TOY_FACTS.eos_token_ids and not (ignore_eos and matching is None):
            break
        if matching is not None and answer is not None:
            matching.advance(token)
            if matching.ended:
                break
        if token in stop_token_ids and not too_short:
            break
        for penalty in penalties:
            penalty.add([token], output=True)
        state = next_state(state, token, position, adapter)
    return tokens[len(prompt) + len(earlier_output) :]


def _after_thought(thought: Thought, output: Sequence[int]) -> tuple[int | None, Sequence[int] | None]:
    """Return the token that must follow ``output``, if one must, and the part behind the thought, None within it."""
    text = b""
    for count, token in enumerate(output):
        if count == thought.max_tokens:
            break
        text += ToyVocabulary().piece(token).data
        if any(closing in text for closing in thought.closings):
            return None, output[count + 1 :]
    if thought.max_tokens is None or len(output) < thought.max_tokens:
        return None, None
    rest = output[thought.max_tokens :]
    if len(rest) < len(thought.ending):
        return thought.ending[len(rest)], None
    return None, rest[len(thought.ending) :]
