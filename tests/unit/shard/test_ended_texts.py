"""What sequences draft from ended ones: of their own pool only, and only while there is room for it."""

from caravan_shard.speculation.acceptance import Draft, DraftKind, KindAcceptance
from caravan_shard.speculation.drafter import Drafter, EndedTexts

PROMPT = list(range(100, 120))
OUTPUT = list(range(200, 230))


def drafter(ended: EndedTexts, pool: bytes = b"mine") -> Drafter:
    return Drafter((), KindAcceptance(), ended, pool)


def test_the_output_of_an_equal_prompt_is_proposed_from_its_start() -> None:
    ended = EndedTexts()
    drafter(ended).end(PROMPT + OUTPUT, len(PROMPT))
    other = drafter(ended)
    assert other.propose(PROMPT, len(PROMPT), 4) == Draft(OUTPUT[:4], DraftKind.POOL_16)
    assert other.propose([7, *PROMPT[-8:]], 9, 4) == Draft(OUTPUT[:4], DraftKind.POOL_8)
    assert other.propose([7, *PROMPT[-7:]], 8, 4) is None
    assert other.propose(PROMPT + OUTPUT[:5], len(PROMPT), 4) == Draft(OUTPUT[5:9], DraftKind.POOL_16)


def test_no_other_pool_has_a_part_in_it() -> None:
    ended = EndedTexts()
    drafter(ended).end(PROMPT + OUTPUT, len(PROMPT))
    for pool in (b"theirs", b""):
        assert drafter(ended, pool).propose(PROMPT, len(PROMPT), 4) is None
    drafter(ended, b"").end(PROMPT + OUTPUT, len(PROMPT))
    assert len(ended) == len(PROMPT) + len(OUTPUT) + 1, "a sequence without a pool leaves nothing"


def test_what_matches_more_of_the_last_tokens_is_proposed() -> None:
    ended = EndedTexts()
    drafter(ended).end(PROMPT + OUTPUT, len(PROMPT))
    short = [*PROMPT[-5:], 1, 2, 3, *PROMPT]
    assert drafter(ended).propose(short, 0, 2) == Draft(OUTPUT[:2], DraftKind.POOL_16)
    equal = [*PROMPT[-16:], 1, 2, 3, *PROMPT]
    assert drafter(ended).propose(equal, 0, 2) == Draft([1, 2], DraftKind.CONTEXT_16)


def test_a_draft_ends_with_the_text() -> None:
    ended = EndedTexts()
    for output in (OUTPUT, OUTPUT[::-1]):
        drafter(ended).end(PROMPT + output, len(PROMPT))
    assert drafter(ended).propose(OUTPUT[:-2], 0, 8) == Draft(OUTPUT[-2:], DraftKind.POOL_16)
    assert drafter(ended).propose(OUTPUT, 0, 8) is None


def test_the_newest_of_equal_beginnings_is_proposed_and_equal_texts_are_kept_once() -> None:
    ended = EndedTexts()
    for output in (OUTPUT, [5, 6, 7], OUTPUT):
        drafter(ended).end(PROMPT + output, len(PROMPT))
    assert drafter(ended).propose(PROMPT, 0, 2) == Draft([5, 6], DraftKind.POOL_16)
    assert len(ended) == 2 * len(PROMPT) + len(OUTPUT) + 3 + 2


def test_a_prompt_without_output_is_not_kept() -> None:
    ended = EndedTexts()
    drafter(ended).end(PROMPT, len(PROMPT))
    assert len(ended) == 0


def test_old_texts_make_room_for_new_ones_of_their_pool_and_old_pools_for_others() -> None:
    ended = EndedTexts()
    for number in range(200):
        drafter(ended).end(list(range(1000 * number, 1000 * number + 200)), 100)
    assert 16_000 < len(ended) <= 16_384
    assert drafter(ended).propose(list(range(100, 120)), 0, 4) is None
    newest = 199_100
    assert drafter(ended).propose(list(range(newest, newest + 20)), 0, 1) == Draft([newest + 20], DraftKind.POOL_16)
    for number in range(3):
        drafter(ended, b"%d" % number).end(list(range(20_000)), 10)
    assert len(ended) <= 4 * 16_384
    assert drafter(ended).propose(list(range(newest, newest + 20)), 0, 1) is not None
    drafter(ended, b"last").end(PROMPT + OUTPUT, len(PROMPT))
    assert len(ended) <= 4 * 16_384
    assert drafter(ended).propose(list(range(newest, newest + 20)), 0, 1) is None, "its pool has the oldest texts"
    assert drafter(ended, b"2").propose(list(range(19_000, 19_020)), 0, 1) == Draft([19_020], DraftKind.POOL_16)
