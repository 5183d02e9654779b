"""The tokens and logprobs of `ModelShard`: functions of the tokens before them."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from caravan_scheduler.core.generation import GenerationSpec
from caravan_scheduler.core.tokens import PromptToken

VOCABULARY_SIZE = 97
# The entry of a prompt token before which nothing was computed.
NO_LOGPROB = PromptToken(None, ())


def _states(tokens: Iterable[int], adapter: str) -> Iterator[int]:
    """Yield the state after each token, which depends on every token, its position and the adapter."""
    state = 7 + sum(adapter.encode())
    for position, token in enumerate(tokens):
        state = (state * 31 + token * 17 + position) % 1_000_003
        yield state


def next_token(tokens: list[int], adapter: str = "") -> int:
    """Return the next token."""
    return deque(_states(tokens, adapter), 1).pop() % VOCABULARY_SIZE


def next_logprobs(tokens: list[int], adapter: str = "") -> list[float]:
    """Return a logprob for each next token: a function of all tokens, without ties between beams in practice."""
    state = deque(_states(tokens, adapter), 1).pop()
    return [-0.01 - ((state * 7919 + token * 104_729 + 31) % 1_000_033) / 250_000 for token in range(VOCABULARY_SIZE)]


def expected_output(spec: GenerationSpec) -> list[int]:
    """Return the output of ``spec``, however it was scheduled. Token 0 ends it early unless ignored."""
    tokens = list(spec.prompt)
    while len(tokens) < spec.max_length:
        tokens.append(next_token(tokens, spec.adapter))
        if tokens[-1] == 0 and not spec.stopping.ignore_eos:
            break
    return tokens[len(spec.prompt) :]


def expected_prompt_logprobs(spec: GenerationSpec) -> tuple[PromptToken, ...]:
    """The prompt logprobs that must be delivered, once."""
    return prompt_logprobs_of(spec.prompt, spec.adapter)


def prompt_logprobs_of(tokens: Sequence[int], adapter: str) -> tuple[PromptToken, ...]:
    """Return the logprob of each of ``tokens``."""
    return (NO_LOGPROB, *(PromptToken(-float(state), ()) for state in _states(tokens[:-1], adapter)))
