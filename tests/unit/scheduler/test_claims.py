"""Which streams may claim the target, and which give way to the prompts that came with them."""

from caravan_scheduler.prefix_tree import NO_MATCH
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.account import Claims
from caravan_scheduler.shard.resident import Resident
from caravan_testing.ledgers import ledger
from caravan_testing.requests import prompt_of, request


def streams(count: int, *, tokens: int = 1) -> list[Resident]:
    """Return residents that have streamed ``tokens``."""
    shard = ledger()
    made = [shard.place(Sequence(request(seed, prompt_of(9, seed), 50)), NO_MATCH, 0) for seed in range(1, count + 1)]
    for resident in made:
        resident.sequence.output.extend(range(tokens))
    return made


def test_a_stream_gives_way_to_as_many_prompts_as_there_were_when_it_began() -> None:
    claims, (stream,) = Claims(), streams(1)
    assert not claims.any_of([stream], prompts=2)
    claims.note_prompt()
    assert not claims.any_of([stream], prompts=5), "one is complete, and more have come"
    claims.note_prompt()
    assert claims.any_of([stream], prompts=5)


def test_a_stream_gives_way_to_no_more_prompts_than_are_left() -> None:
    claims, (stream,) = Claims(), streams(1)
    assert not claims.any_of([stream], prompts=3)
    assert claims.any_of([stream], prompts=0)
    assert claims.any_of([stream], prompts=3), "these came later"


def test_one_stream_that_claims_the_target_is_enough() -> None:
    claims, (early, late) = Claims(), streams(2)
    assert claims.any_of([early], prompts=0)
    assert claims.any_of([early, late], prompts=2)
    assert not claims.any_of([late], prompts=2)
    assert not claims.any_of([], prompts=2)


def test_a_stream_that_comes_back_claims_the_target_at_once() -> None:
    claims, (stream,) = Claims(), streams(1, tokens=7)
    assert claims.any_of([stream], prompts=3)
