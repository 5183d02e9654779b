"""Media in prompts, on the toy backend, whose media spell text, and the passes of a step with media."""

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import PrefixCopy, RowOutputs, Save
from caravan_proto.messages.results import StepOutcome
from caravan_shard.backends.base import TokenBatch
from caravan_shard.backends.llama.media.passes import media_passes
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.backends.toy.media import SLICE_CELLS, ToyEncoder
from caravan_shard.media import (
    NO_TOKEN,
    CellSpan,
    EncodedSlice,
    MediaRows,
    MediaStore,
    SliceSize,
    cell_count,
    position_of,
    positions_of,
    spans_before,
)
from caravan_shard.protocol.results import Refusal, StepResult
from caravan_shard.speculation.drafter import Context
from caravan_testing.media_prompts import MediaPrompt, Medium, encode, media_prompt, run_prompt, toy_picture, toy_sound
from caravan_testing.shard_builders import EngineDriver, load_entry, row, save_entry, with_parameters
from caravan_testing.toy_oracle import expected_output

_BEFORE, _PICTURE, _BETWEEN, _SOUND, _AFTER = "look: ", "a cat", " listen: ", "meow", " so?"
_TEXT = f"{_BEFORE}{_PICTURE}{_BETWEEN}{_SOUND}{_AFTER}"


def _driver(*, atomic: bool = False) -> EngineDriver:
    return EngineDriver(ToyBackend(media=ToyEncoder(atomic=atomic)))


def _prompt(driver: EngineDriver, *parts: str | Medium, encodes: bool = True) -> MediaPrompt:
    parts = parts or (_BEFORE, toy_picture(_PICTURE), _BETWEEN, toy_sound(_SOUND), _AFTER)
    read = [list(part.encode()) if isinstance(part, str) else part for part in parts]
    return media_prompt(driver, *read, encodes=encodes)


def _words(text: str = _TEXT) -> MediaPrompt:
    return MediaPrompt(list(text.encode()))


@pytest.mark.parametrize("atomic", [False, True])
def test_media_are_their_text(atomic: bool) -> None:
    driver = _driver(atomic=atomic)
    prompt = _prompt(driver)
    assert [span.positions == span.count for span in prompt.media] == [not atomic] * 2
    output = run_prompt(driver, prompt, max_new=20)
    assert output == expected_output(list(_TEXT.encode()), 20, ignore_eos=True)


def _first_token(driver: EngineDriver, prompt: MediaPrompt, **fields: Any) -> int:
    driver.engine.release_all()
    return run_prompt(driver, prompt, max_new=1, **fields)[0]


def test_penalties_do_not_see_media() -> None:
    driver = _driver()
    beginnings = (f"{number} " for number in range(1000))
    before, letter = next(
        (before, letter)
        for before in beginnings
        for letter in "abcdefghijklmnopqrstuvwxyz"
        if _first_token(driver, _words(before + letter)) == ord(letter)
    )
    prompt = _prompt(driver, before, toy_picture(letter))
    for penalty in ({"repetition_penalty": 100.0}, {"dry_multiplier": 5.0, "dry_allowed_length": 1}):
        assert _first_token(driver, prompt, **penalty) == ord(letter)
    assert _first_token(driver, _words(before + letter), repetition_penalty=100.0) != ord(letter)


def test_prompt_logprobs_of_media_are_nan() -> None:
    driver = _driver()

    def logprobs(prompt: MediaPrompt) -> Sequence[float]:
        chunk = with_parameters(prompt.first_chunk(0, logprobs=True, top_n_tokens=2), prompt_logprobs=True)
        result = driver.prefill(chunk)
        driver.engine.release_all()
        assert result.prompt_logprobs is not None
        assert result.prompt_logprobs.counts == [len(prompt)]
        assert result.prompt_logprobs.top_counts.count(0) == sum(map(math.isnan, result.prompt_logprobs.logprobs))
        return result.prompt_logprobs.logprobs

    prompt = _prompt(driver)
    of_words, of_media = logprobs(_words()), logprobs(prompt)
    under = {cell for span in prompt.media for cell in range(span.offset, span.end)}
    assert len(under) == len(_PICTURE) + len(_SOUND)
    for cell, (one, other) in enumerate(zip(of_words, of_media, strict=True)):
        assert math.isnan(other) if cell in under else one == pytest.approx(other, nan_ok=True)


def test_rows_may_have_media() -> None:
    driver = _driver()
    prompt = _prompt(driver)
    found = driver.evaluate(row(0, prompt.token_ids, media=prompt.media, outputs=RowOutputs.LAST, top_n_tokens=5))
    driver.engine.release_all()
    expected = driver.evaluate(row(0, _words().token_ids, outputs=RowOutputs.LAST, top_n_tokens=5))
    assert (found.top_token_ids, found.top_logprobs) == (expected.top_token_ids, expected.top_logprobs)
    driver.engine.release_all()
    inner = driver.evaluate(row(0, prompt.token_ids, media=prompt.media)).logprobs
    assert [math.isnan(one) for one in inner[5:11]] == [True] * 5 + [False]


def test_drafts_propose_no_media() -> None:
    """After a repetition, a draft would go on with what followed the first time, which is a picture."""
    repeated = [*range(10)]
    for media, expected in ((0, [20, 21, 22]), (1, [20, 21]), (2, [20]), (3, None)):
        tokens = [*repeated, 20, 21, 22]
        tokens[len(tokens) - media :] = [NO_TOKEN] * media
        draft = Context().propose([*tokens, *repeated], 3)
        assert (None if draft is None else draft.tokens) == expected


def test_a_step_without_its_media_carries_out_its_header_only() -> None:
    driver = _driver()
    run_prompt(driver, _words(), 1)
    prompt = _prompt(driver, encodes=False)
    encode(driver, toy_sound(_SOUND))
    missing = (toy_picture(_PICTURE).shape.media_id,)
    for result in (
        driver.try_prefill(prompt.first_chunk(0), release=[1]),
        driver.try_evaluate(row(0, prompt.token_ids, media=prompt.media)),
    ):
        assert isinstance(result, StepResult)
        assert (result.outcome, result.missing_media) == (StepOutcome.MEDIA_MISSING, missing)
        assert driver.engine.sequence_count == 0
    encode(driver, toy_picture(_PICTURE))
    assert run_prompt(driver, prompt, max_new=5) == expected_output(list(_TEXT.encode()), 5, ignore_eos=True)


def test_forgotten_embeddings_do_not_matter_to_what_is_computed() -> None:
    driver = _driver()
    prompt = _prompt(driver)
    driver.prefill(prompt.first_chunk(0, max_new=20, ignore_eos=True))
    driver.engine.media.put(b"large", [_slice(driver.engine.media.capacity // 4)])
    assert driver.engine.media.find(toy_picture(_PICTURE).shape.media_id) is None
    driver.decode([0])
    assert run_prompt(driver, prompt, 1, copy=PrefixCopy(0, len(prompt) - 1), max_new=20) == driver.output[0]


def _slice(numbers: int) -> EncodedSlice:
    return EncodedSlice(embeddings=np.zeros((numbers, 1), np.float32), size=SliceSize(numbers, numbers))


_KEPT = len(_BEFORE) + 2


def test_atomic_spans_are_never_cut() -> None:
    driver = _driver(atomic=True)
    prompt = _prompt(driver)
    run_prompt(driver, prompt)
    span = prompt.media[0]
    tokens = prompt.token_ids
    cut_save = save_entry(0, tokens, 0, span.offset + 1)
    refusals = [
        driver.try_prefill(park={0: _KEPT}),
        driver.try_prefill(_words().first_chunk(1, copy=PrefixCopy(0, _KEPT))),
        driver.try_evaluate(row(1, tokens[_KEPT:], copy=PrefixCopy(0, _KEPT))),
        driver.try_evaluate(row(1, tokens, media=prompt.media, keep_length=_KEPT)),
        driver.engine.save(Save(entries=[cut_save]), 0),
    ]
    assert [one.error for one in refusals if isinstance(one, Refusal)] == [ShardError.WRONG_POSITION] * len(refusals)
    # A row behind the media may be cut back to where they end, and no further.
    kept = driver.try_evaluate(row(1, tokens, media=prompt.media, keep_length=span.end))
    assert isinstance(kept, StepResult)
    refused = driver.try_evaluate(row(1, [1, 2], span.end, keep_length=_KEPT))
    assert isinstance(refused, Refusal)
    assert refused.error is ShardError.WRONG_POSITION


def test_atomic_spans_are_loaded_whole() -> None:
    driver = _driver(atomic=True)
    prompt = _prompt(driver)
    expected = run_prompt(driver, prompt)
    tokens, border = prompt.token_ids, prompt.media[0].end
    assert driver.save(save_entry(0, tokens[:border]), save_entry(0, tokens, border, release=True)) == [True] * 2
    entry = load_entry(0, tokens, (tokens[:border], border), (tokens, len(tokens)))
    assert driver.load(replace(entry, media=prompt.media)) == [True]
    refused = driver.try_prefill(_words().first_chunk(1, copy=PrefixCopy(0, _KEPT)))
    assert isinstance(refused, Refusal)
    assert run_prompt(driver, prompt, 1, copy=PrefixCopy(0, len(tokens) - 1)) == expected


def test_media_behind_the_prompt_are_refused() -> None:
    driver = _driver()
    prompt = _prompt(driver, "text", toy_picture("x"))
    refused = driver.try_prefill(prompt.first_chunk(0, prompt_length=4))
    assert isinstance(refused, Refusal)
    assert refused.error is ShardError.BAD_REQUEST


def test_slices_are_taken_where_a_chunk_is_cut() -> None:
    driver = _driver()
    text = "".join(chr(97 + number % 26) for number in range(2 * SLICE_CELLS + 5))
    prompt = _prompt(driver, "see ", toy_picture(text), " now")
    expected = expected_output(list(f"see {text} now".encode()), 16, ignore_eos=True)
    for cuts in ([1], [4 + SLICE_CELLS], [10, 20, 4 + SLICE_CELLS + 3, 4 + 2 * SLICE_CELLS + 1]):
        driver.engine.release_all()
        assert run_prompt(driver, prompt, cuts=cuts) == expected


def _piece(cells: int, *, causal: bool = True) -> EncodedSlice:
    return EncodedSlice(embeddings=np.zeros((cells, 2), np.float32), size=SliceSize(cells, cells), causal=causal)


def _batch(*sequences: str, causal: bool = True) -> TokenBatch:
    """Make a step: in each text, letters are tokens and runs of equal digits are spans. An output follows the last."""
    tokens: list[int] = []
    ids: list[int] = []
    outputs: list[int] = []
    media: list[MediaRows] = []
    for sequence_id, text in enumerate(sequences):
        for place, letter in enumerate(text):
            if letter.isdigit() and text[place - 1 : place] != letter:
                count = len(text[place:]) - len(text[place:].lstrip(letter))
                media.append(MediaRows(len(tokens), _piece(count, causal=causal), 0, count))
            tokens.append(NO_TOKEN if letter.isdigit() else ord(letter))
            ids.append(sequence_id)
            outputs.append(place == len(text) - 1)
    positions = [place for text in sequences for place in range(len(text))]
    return TokenBatch(
        tokens=np.array(tokens, np.int32),
        positions=np.array(positions, np.int32),
        sequence_ids=np.array(ids, np.int32),
        outputs=np.array(outputs, np.int8),
        media=media,
    )


def _shown(batch: TokenBatch, *sequences: str) -> list[str]:
    """Return the rows of each pass as the letters that they were made of."""
    letters = np.array(list("".join(sequences)))
    return ["".join(letters[one.rows]) for one in media_passes(batch)]


@pytest.mark.parametrize(
    ("sequences", "passes"),
    [
        (["11a"], ["11", "a"]),
        (["11"], ["11"]),
        (["ab11c"], ["ab", "11", "c"]),
        (["ab11c", "d"], ["ab", "11", "cd"]),
        (["a11", "b22c", "d"], ["ab", "1122", "cd"]),
        (["a11b22c", "33d", "e"], ["a", "11", "b", "2233", "cde"]),
        (["1122a"], ["11", "22", "a"]),
        (["a", "b", "11"], ["11", "ab"]),
    ],
)
def test_media_come_before_the_tokens_behind_them(sequences: list[str], passes: list[str]) -> None:
    batch = _batch(*sequences)
    assert _shown(batch, *sequences) == passes
    for one in media_passes(batch):
        assert bool(one.batch.media) == bool((one.batch.tokens == NO_TOKEN).all())
        assert one.causal
        rows = [row for span in one.batch.media for row in range(span.row, span.row + span.cells)]
        assert not one.batch.media or rows == list(range(len(one.batch.tokens)))


def test_slices_that_see_themselves_are_alone() -> None:
    sequences = ["a11b", "22c", "d"]
    batch = _batch(*sequences, causal=False)
    assert _shown(batch, *sequences) == ["a", "11", "22", "bcd"]
    assert [one.causal for one in media_passes(batch)] == [True, False, False, True]


@given(st.lists(st.tuples(st.text("ab", max_size=3), st.integers(1, 4)), min_size=1, max_size=4), st.booleans())
def test_every_row_is_computed_once_and_in_order(parts: list[tuple[str, int]], causal: bool) -> None:
    text = "".join(before + str(place % 10) * count for place, (before, count) in enumerate(parts))
    sequences = [text, "xyz", f"{text}t"]
    batch = _batch(*sequences, causal=causal)
    passes = media_passes(batch)
    assert (np.sum([one.rows for one in passes], axis=0) == 1).all()
    for sequence_id in range(len(sequences)):
        order = [row for one in passes for row in np.flatnonzero(one.rows & (batch.sequence_ids == sequence_id))]
        assert order == sorted(order)
    for one in passes:
        assert np.array_equal(one.batch.positions, batch.positions[one.rows])
        assert np.array_equal(one.batch.outputs, batch.outputs[one.rows])


def _spans(draws: Sequence[tuple[int, int, int]]) -> tuple[CellSpan, ...]:
    spans, start = [], 0
    for gap, cells, positions in draws:
        start += gap
        spans.append(CellSpan(start, start + cells, min(cells, positions)))
        start += cells
    return tuple(spans)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9), st.integers(1, 9)), max_size=4))
def test_positions_and_cells_are_each_others_inverse(draws: list[tuple[int, int, int]]) -> None:
    spans = _spans(draws)
    length = (spans[-1].end if spans else 0) + 5
    positions = positions_of(spans, 0, length).tolist()
    assert all(0 <= later - earlier <= 9 for earlier, later in pairwise(positions))
    for cell in range(length):
        if not any(span.start <= cell < span.end for span in spans):
            assert positions[cell] == position_of(spans, cell)
        if any(span.start < cell + 1 < span.end for span in spans):
            continue  # it never ends there
        held = spans_before(spans, cell + 1)
        assert cell_count(held, positions[cell]) == cell + 1
    assert cell_count((), -1) == 0


def test_the_least_recently_used_embeddings_are_forgotten() -> None:
    store = MediaStore(3 * 80)
    for name in (b"a", b"b", b"c"):
        assert store.put(name, [_piece(10)])
    assert store.find(b"a") is not None
    assert store.put(b"d", [_piece(10)])
    assert [store.find(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert store.size == 3 * 80
    assert store.put(b"a", [_piece(5), _piece(5)])
    assert store.size == 3 * 80
    assert not store.put(b"large", [_piece(31)])
    assert store.find(b"large") is None
    assert store.put(b"all", [_piece(30)])
    assert (store.find(b"a"), store.find(b"d"), store.size) == (None, None, 240)


def test_threads_may_use_the_store_at_once() -> None:
    store = MediaStore(20 * 80)

    def use(name: bytes) -> None:
        for number in range(200):
            store.put(name + bytes([number % 10]), [_piece(1 + number % 20)])
            store.find(name + bytes([number % 7]))

    threads = [threading.Thread(target=use, args=(bytes([name]),)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    held = [store.find(bytes([name, number])) for name in range(4) for number in range(10)]
    assert store.size == sum(one.size_bytes for slices in held if slices for one in slices) <= store.capacity
