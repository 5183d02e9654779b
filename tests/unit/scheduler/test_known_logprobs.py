"""Logprobs of prompts that other prompts begin like."""

import dataclasses
from collections.abc import Iterable

from caravan_proto.messages.sampling import SamplingParams
from caravan_scheduler.core.tokens import PromptToken
from caravan_scheduler.known_logprobs import KnownLogprobs
from caravan_scheduler.sequence import Sequence
from caravan_testing.ledgers import sequence

CONTEXT = range(1, 41)


def scored(request_id: int, prompt: Iterable[int], *, top_n: int = 0, **fields: str) -> Sequence:
    """Return a sequence that needs prompt logprobs, with ``top_n`` alternatives."""
    made = sequence(request_id, prompt, prompt_logprobs=True, **fields)  # type: ignore[arg-type]
    spec = dataclasses.replace(made.spec, sampling=SamplingParams(top_n_tokens=top_n))
    return Sequence(dataclasses.replace(made.request, spec=spec))


def logprobs(start: int, stop: int) -> list[PromptToken]:
    return [PromptToken(-float(place) if place else None, ()) for place in range(start, stop)]


def computed(known: KnownLogprobs, one: Sequence, count: int | None = None) -> Sequence:
    """Let the logprobs of the first ``count`` tokens of ``one`` be known; all by default."""
    one.add_prompt_logprobs(0, logprobs(0, len(one.spec.prompt) if count is None else count))
    known.note(one)
    return one


def shared(known: KnownLogprobs, one: Sequence) -> int:
    known.share_with(one)
    assert one.prompt_logprobs == logprobs(0, len(one.prompt_logprobs))
    return len(one.prompt_logprobs)


def test_prompts_that_begin_alike_share_the_logprobs_of_their_common_tokens() -> None:
    known = KnownLogprobs()
    computed(known, scored(1, [*CONTEXT, 90, 91]))
    assert shared(known, scored(2, [*CONTEXT, 70, 71, 72])) == 40
    assert shared(known, scored(3, [*range(1, 31), 70, 71])) == 30
    assert shared(known, scored(4, range(2, 42))) == 0
    # The last logprob is always computed, and the others are delivered with it.
    assert shared(known, scored(5, [*CONTEXT, 90, 91])) == 41
    assert shared(known, scored(6, CONTEXT)) == 39


def test_a_prompt_under_way_shares_what_is_known_by_now() -> None:
    known = KnownLogprobs()
    leader = computed(known, scored(1, CONTEXT), 20)
    waiting = scored(2, [*CONTEXT, 70])
    assert shared(known, waiting) == 20
    leader.add_prompt_logprobs(20, logprobs(20, 40))
    known.note(leader)
    assert shared(known, waiting) == 40
    assert known.size == 40


def test_only_equal_namespaces_adapters_and_alternatives_share() -> None:
    known = KnownLogprobs()
    computed(known, scored(1, CONTEXT))
    assert shared(known, scored(2, CONTEXT, top_n=2)) == 0
    assert shared(known, scored(3, CONTEXT, adapter="x")) == 0


def test_the_least_recently_used_make_room() -> None:
    known = KnownLogprobs(100)
    computed(known, scored(1, CONTEXT))
    computed(known, scored(2, range(50, 90)))
    assert shared(known, scored(3, CONTEXT)) == 39
    computed(known, scored(4, range(100, 130)))
    assert known.size == 70
    assert shared(known, scored(5, CONTEXT)) == 39
    assert shared(known, scored(6, range(50, 90))) == 0
    # Alternatives count too.
    computed(known, scored(7, range(200, 230), top_n=2))
    assert known.size == 90
    known.clear()
    assert (known.size, shared(known, scored(8, range(200, 230), top_n=2))) == (0, 0)
