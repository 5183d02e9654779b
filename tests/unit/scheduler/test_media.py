"""Pictures in prompts: encoded once where they are needed, shared as text is, and never cut where they must not be."""

from caravan_proto.messages.commands import Prefill
from caravan_scheduler.actions import Encode, FailureReason, Preemption
from caravan_scheduler.core.generation import GenerationState
from caravan_scheduler.events import EncodeOutcome
from caravan_scheduler.planning.preemption import choose_how
from caravan_scheduler.sequence import Sequence
from caravan_testing.ledgers import LIMITS, SAVING, ledger, limits_of, run
from caravan_testing.model_media import with_pictures
from caravan_testing.requests import request
from caravan_testing.simulation import simulation

_TEXT = tuple(range(1, 41))


def test_a_picture_is_encoded_before_its_chunk_and_text_goes_on_meanwhile() -> None:
    made = simulation()
    prompt, media = with_pictures(_TEXT, [(10, 20, 1)])
    shown = made.submit(prompt, 5, media=media, ignore_eos=True)
    assert made.scheduler.standing_of(shown).state is GenerationState.ENCODING
    assert not made.shards["a"].commands
    read = made.submit(_TEXT, 5, ignore_eos=True)
    while read not in made.finished:
        made.advance("a")
    assert not made.received[shown]
    made.finish_encoding("a")
    made.settle()
    assert shown in made.finished
    assert len(made.sent(Encode)) == 1


def test_the_same_picture_is_encoded_once_for_all_prompts_of_a_shard() -> None:
    made = simulation()
    for text in (_TEXT, _TEXT[::-1], _TEXT):
        prompt, media = with_pictures(text, [(10, 20, 1), (35, 5, 1)])
        made.submit(prompt, 5, media=media)
    made.settle()
    assert len(made.sent(Encode)) == 1


def test_a_picture_that_is_cached_is_not_encoded() -> None:
    made = simulation()
    prompt, media = with_pictures(_TEXT, [(0, 20, 1)])
    made.complete(prompt, 5, media=media)
    made.shards["a"].encoded.clear()
    made.scheduler.shards["a"].media.forget([span.media_id for span in media.spans] if media else [])
    longer, more = with_pictures((*_TEXT, 50, 51), [(0, 20, 1)])
    made.submit(longer, 5, media=more)
    made.settle()
    assert len(made.sent(Encode)) == 1


def test_a_picture_that_the_shard_has_dropped_is_encoded_again() -> None:
    made = simulation()
    prompt, media = with_pictures(_TEXT, [(10, 20, 1)])
    made.complete(prompt, 5, media=media)
    made.shards["a"].encoded.clear()
    made.submit((*_TEXT[:5], *prompt), 5, media=with_pictures((*_TEXT[:5], *_TEXT), [(15, 20, 1)])[1])
    made.settle()
    assert len(made.sent(Encode)) == 2
    assert len(made.finished) == 2


def test_a_request_whose_pictures_do_not_all_fit_at_once_is_computed_one_by_one() -> None:
    made = simulation(limits=limits_of(max_batch_tokens=32))
    made.shards["a"].most_encoded = 1
    prompt, media = with_pictures(tuple(range(1, 91)), [(5, 20, 1), (30, 20, 2), (55, 20, 3)])
    made.submit(prompt, 5, media=media)
    made.settle()
    assert len(made.finished) == 1


def test_a_request_ends_that_a_shard_never_has_encoded_when_it_is_to_be_computed() -> None:
    made = simulation(limits=limits_of(max_batch_tokens=128))
    made.shards["a"].most_encoded = 0
    prompt, media = with_pictures(_TEXT, [(5, 20, 1)])
    failed = made.complete(prompt, 5, media=media)
    assert made.failed == {failed: FailureReason.MEDIA}
    made.check_at_rest()


def test_a_picture_that_is_refused_ends_its_request_alone() -> None:
    made = simulation()
    bad, bad_media = with_pictures(_TEXT, [(5, 20, 1)])
    good, good_media = with_pictures(_TEXT, [(5, 20, 2)])
    first = made.submit(bad, 5, media=bad_media)
    made.submit(good, 5, media=good_media)
    made.finish_encoding("a", EncodeOutcome.REFUSED)
    made.settle()
    assert made.failed == {first: FailureReason.MEDIA}
    assert len(made.finished) == 1


def test_a_failed_encoding_is_tried_again() -> None:
    made = simulation()
    prompt, media = with_pictures(_TEXT, [(5, 20, 1)])
    made.submit(prompt, 5, media=media)
    made.finish_encoding("a", EncodeOutcome.FAILED)
    made.settle()
    assert len(made.finished) == 1


def test_a_picture_that_is_being_encoded_when_shards_are_lost_goes_to_no_third_shard() -> None:
    made = simulation("a", "b", "c")
    prompt, media = with_pictures(_TEXT, [(5, 20, 1)])
    failed = made.submit(prompt, 5, media=media)
    for _ in range(2):
        (encode,) = made.encodings.values()
        made.lose(encode.shard)
    assert made.failed == {failed: FailureReason.MEDIA}
    again = made.submit((9, *prompt), 5, media=with_pictures((9, *_TEXT), [(6, 20, 1)])[1])
    assert made.failed[again] is FailureReason.MEDIA
    made.settle()


def test_a_shard_that_was_only_cut_off_is_not_held_against_a_picture() -> None:
    made = simulation("a")
    prompt, media = with_pictures(_TEXT, [(5, 20, 1)])
    shown = made.submit(prompt, 5, media=media)
    for _ in range(3):
        made.lose("a")
        made.join("a", LIMITS, survived=True)
    made.run()
    assert shown in made.finished
    made.check_at_rest()


def test_a_request_goes_where_its_picture_is_encoded() -> None:
    made = simulation("a", "b")
    prompt, media = with_pictures(_TEXT, [(20, 20, 1)])
    made.complete(prompt, 5, media=media)
    (first,) = made.sent(Encode)
    for seed in range(4):
        text = [(token * 7 + seed) % 90 for token in _TEXT]
        made.complete(*with_pictures(text, [(20, 20, 1)])[:1], 5, media=with_pictures(text, [(20, 20, 1)])[1])
    assert made.sent(Encode) == [first]
    made.check_at_rest()


def test_spans_that_cannot_be_cut_come_whole() -> None:
    made = simulation(limits=limits_of(max_batch_tokens=32))
    made.shards["a"].atomic = True
    prompt, media = with_pictures(tuple(range(1, 91)), [(5, 30, 1), (40, 31, 2), (75, 10, 3)], atomic=True)
    made.submit(prompt, 5, media=media, ignore_eos=True)
    made.settle()
    chunks = [chunk for action in made.sent(Prefill) for chunk in action.chunks]
    assert [[span.count for span in chunk.media] for chunk in chunks if chunk.media] == [[30], [31], [10]]
    assert len(made.finished) == 1


def test_a_span_as_large_as_a_step_waits_for_no_end_of_decodes() -> None:
    made = simulation(limits=limits_of(max_batch_tokens=32))
    made.shards["a"].atomic = True
    made.submit(_TEXT, 200, ignore_eos=True)
    made.advance("a")
    prompt, media = with_pictures(tuple(range(1, 51)), [(5, 32, 1)], atomic=True)
    shown = made.submit(prompt, 5, media=media, ignore_eos=True)
    while not made.encodings:
        made.advance("a")
    made.finish_encoding("a")
    made.advance("a", 30)
    assert shown in made.finished
    made.settle()


def test_a_fleet_without_the_projector_does_not_take_pictures() -> None:
    made = simulation()
    prompt, media = with_pictures(_TEXT, [(5, 20, 1)])
    assert media is not None
    other = made.submit(prompt, 5, media=type(media)(spans=media.spans, contents=media.contents, encoder=b"other"))
    assert made.failed == {other: FailureReason.DOES_NOT_FIT}


def test_a_picture_of_another_namespace_is_not_shared() -> None:
    made = simulation()
    prompt, media = with_pictures(_TEXT, [(0, 30, 1)])
    for namespace in ("x", "y"):
        made.complete(prompt, 5, media=media, namespace=namespace)
    prefills = made.sent(Prefill)
    assert all(chunk.copy is None for action in prefills for chunk in action.chunks)
    made.check_at_rest()


def test_a_span_that_cannot_be_cut_has_its_prompt_logprobs_in_one_step() -> None:
    made = simulation(limits=limits_of(max_prompt_logprob_tokens=16))
    made.shards["a"].atomic = True
    prompt, media = with_pictures(_TEXT, [(3, 9, 1), (12, 15, 2)], atomic=True)
    shown = [made.submit((token, *prompt[1:]), 5, media=media, prompt_logprobs=True) for token in (1, 2, 3)]
    too_large, more = with_pictures(_TEXT, [(3, 17, 1)], atomic=True)
    refused = made.submit(too_large, 5, media=more, prompt_logprobs=True)
    made.settle()
    assert made.finished == set(shown)
    assert made.failed == {refused: FailureReason.DOES_NOT_FIT}


def test_cells_whose_media_would_be_encoded_again_are_rather_saved() -> None:
    shard = ledger(limits=limits_of(**SAVING))
    prompt, media = with_pictures(_TEXT, [(5, 20, 1)])
    assert media is not None
    resident = run(shard, Sequence(request(1, prompt, 20, media=media)))
    shard.costs.copy_cell_s = 1.0
    shard.media.note(media.spans[0].media_id, 20, 0.0)
    shard.media.cell_s = 10.0
    assert choose_how(shard, resident) is Preemption.RECOMPUTE
    shard.media.forget([media.spans[0].media_id])
    assert choose_how(shard, resident) is Preemption.SWAP
