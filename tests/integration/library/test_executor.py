"""`Executor` over the toy model: room, misuse, files, samplers, media. Any order of calls: tests/property."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import caravan
from caravan import LLM, Conversation, Executor, Picture, RequestError, SamplingParams, Sound, State, StateError
from caravan.saved_state import decode
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_testing.media_prompts import spelled_picture, spelled_sound

_SMALL = {"backend": "fake", "ctx_size": 64, "parallel": 4, "batch_size": 16, "cache_ram": 0}


def _executor(**options: object) -> Executor:
    return Executor("toy.gguf", **(_SMALL | options))  # type: ignore[arg-type]


@pytest.fixture
def executor() -> Iterator[Executor]:
    with _executor() as made:
        yield made


def _infer_all(executor: Executor) -> None:
    while executor.infer().waiting:
        pass


def _written(conversation: Conversation, count: int, sampler: SamplingParams | None = None) -> list[int]:
    return [token.id for token in conversation.generate(count, sampler or SamplingParams(temperature=0))]


def test_a_step_computes_what_fits_and_says_so(executor: Executor) -> None:
    first, second = executor.create(), executor.create()
    first.prompt("a prompt of 21 bytes")
    second.prompt("short")
    did = executor.infer()
    assert (did.done, did.waiting, did.starved) == ((), (first, second), ())
    did = executor.infer()
    assert (did.done, did.waiting, did.starved) == ((first, second), (), ())
    assert executor.infer() == caravan.Inference((), (), ())


def test_a_full_cache_is_a_value_and_loses_nothing(executor: Executor) -> None:
    first, second, third = executor.create(), executor.create(), executor.create()
    first.prompt(list(range(50)))
    _infer_all(executor)
    second.prompt(list(range(30)))
    third.prompt([1, 2])
    executor.infer()
    did = executor.infer()
    assert (did.done, did.starved) == ((), (second,))
    assert (second.state, second.tokens) == (State.PENDING, list(range(30)))
    first.close()
    _infer_all(executor)
    assert (second.state, third.state) == (State.READY, State.READY)


def test_the_rest_goes_on_when_the_oldest_has_no_room(executor: Executor) -> None:
    big, small = executor.create(), executor.create()
    filler = executor.create()
    filler.prompt(list(range(60)))
    _infer_all(executor)
    big.prompt(list(range(10)))
    small.prompt([7])
    did = executor.infer()
    assert (did.done, did.starved) == ((small,), (big,))


def test_the_rest_goes_on_when_the_oldest_fills_the_batch_and_has_no_room(executor: Executor) -> None:
    filler, big, small = executor.create(), executor.create(), executor.create()
    filler.prompt(list(range(60)))
    _infer_all(executor)
    big.prompt(list(range(16)))
    small.prompt([7])
    assert executor.infer() == caravan.Inference((small,), (), (big,))


@pytest.mark.parametrize("how", ["fork", "load"])
def test_a_copy_without_cells_drops_the_logits_that_it_will_compute_again(how: str) -> None:
    tokens = list(range(30))
    with _executor(parallel=1) as executor:
        first = executor.create()
        first.prompt(tokens, all_logits=True)
        assert executor.infer().waiting == (first,)
        copy = first.fork() if how == "fork" else executor.load(first.save())
        assert copy.held == 0 < first.held < len(tokens)
        _infer_all(executor)
        expected = [first.logits(offset) for offset in range(len(tokens))]
        first.close()
        _infer_all(executor)
        assert all(np.array_equal(copy.logits(offset), row) for offset, row in enumerate(expected))
        with pytest.raises(IndexError):
            copy.logits(len(tokens))


def test_there_may_be_more_conversations_than_sequences(executor: Executor) -> None:
    many = [executor.create() for _ in range(6)]
    for number, conversation in enumerate(many):
        conversation.prompt([number, number])
    did = executor.infer()
    assert (did.done, did.starved) == (tuple(many[:4]), tuple(many[4:]))
    for conversation in many[:4]:
        conversation.unload()
    assert executor.infer().done == tuple(many[4:])
    assert all(conversation.state is State.READY for conversation in many)


def test_unloading_in_the_middle_of_a_prompt_keeps_each_row_once(executor: Executor) -> None:
    conversation, other = executor.create(), executor.create()
    tokens = list(range(24))
    for one in (conversation, other):
        one.prompt(tokens, all_logits=True)
        executor.infer()
    conversation.unload()
    _infer_all(executor)
    other.unload()
    _infer_all(executor)
    with pytest.raises(IndexError):
        conversation.logits(24)
    for offset in range(24):
        assert np.array_equal(conversation.logits(offset), other.logits(offset))


def test_misuse_has_a_name_and_changes_nothing(executor: Executor) -> None:
    conversation = executor.create()
    calls: list[Callable[[], object]] = [conversation.logits, conversation.sample]
    for call in calls:
        with pytest.raises(caravan.NeedsPrompt):
            call()
    conversation.prompt("a")
    calls += [lambda: conversation.rewind(1), lambda: conversation.shift_left(1)]
    for call in calls:
        with pytest.raises(caravan.NeedsInfer):
            call()
    with pytest.raises(caravan.AlreadyPrompted):
        conversation.prompt("b")
    with pytest.raises(caravan.TooLong):
        executor.create().prompt("x" * 80)
    executor.infer()
    for refused in ([999], [-1], []):
        with pytest.raises(caravan.RequestError):
            conversation.prompt(refused)
    for wrong in (SamplingParams(logit_bias={999: 1.0}), SamplingParams(min_tokens=1), lambda _logits: 999):
        with pytest.raises(caravan.RequestError):
            conversation.sample(wrong)
    assert (conversation.text, conversation.state) == ("a", State.READY)
    conversation.close()
    calls += [conversation.fork, conversation.save, conversation.unload, lambda: conversation.text]
    for call in calls:
        with pytest.raises(caravan.ConversationEnded):
            call()


def test_a_closed_executor_says_so() -> None:
    executor = _executor()
    conversation = executor.create()
    executor.close()
    executor.close()
    conversation.close()
    assert conversation.state is State.ENDED
    with pytest.raises(caravan.ClosedError):
        executor.create()


def test_options_of_an_engine_are_refused() -> None:
    with pytest.raises(TypeError, match="no engine with the options: speculate"):
        _executor(speculate=4)
    with pytest.raises(caravan.ModelError):
        Executor("nowhere.gguf")


def test_a_fork_that_waits_keeps_its_tokens(executor: Executor) -> None:
    conversation = executor.create()
    conversation.prompt("pending")
    other = conversation.fork()
    conversation.close()
    assert (other.state, other.text) == (State.PENDING, "pending")
    executor.infer()
    assert other.sample().id == int(other.logits().argmax())


def test_tokens_are_those_of_the_engine(executor: Executor) -> None:
    """The same parameters draw the same tokens, penalties of the output included."""
    params = SamplingParams(
        seed=7, max_tokens=20, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.5, top_k=40, top_p=0.9,
        logit_bias={65: 2.0}, dry_multiplier=0.8,
    )  # fmt: skip
    with LLM("toy.gguf", backend="fake", ctx_size=64) as llm:
        expected = llm.generate("Penalties", params)[0].outputs[0].token_ids
    conversation = executor.create()
    conversation.prompt("Penalties")
    tokens = []
    for _ in range(20):
        executor.infer()
        token = conversation.sample(params)
        conversation.prompt(token)
        tokens.append(token.id)
    assert tokens == expected


def test_a_sampler_and_a_criterion_of_ones_own(executor: Executor) -> None:
    conversation = executor.create()
    conversation.prompt("custom")
    seen: list[NDArray[np.float32]] = []

    def second_best(logits: NDArray[np.float32]) -> int:
        seen.append(logits.copy())
        logits[logits.argmax()] = -np.inf
        return int(logits.argmax())

    tokens = list(conversation.generate(30, second_best, stop=lambda token: len(seen) == 5))
    assert len(tokens) == 5
    assert {(logits.shape, logits.dtype) for logits in seen} == {((executor.vocabulary_size,), np.dtype(np.float32))}
    assert [token.id for token in tokens] == [int(np.argsort(logits)[-2]) for logits in seen]
    assert conversation.token_count == len(executor.tokenize("custom")) + 4


def test_generating_into_a_full_cache_can_go_on(executor: Executor) -> None:
    filler, conversation = executor.create(), executor.create()
    filler.prompt(list(range(50)))
    conversation.prompt([1] * 10)
    _infer_all(executor)
    with pytest.raises(caravan.CacheFull):
        for _token in conversation.generate(10, SamplingParams(temperature=0, logit_bias={257: -100.0})):
            pass
    assert (conversation.state, conversation.token_count) == (State.PENDING, 15)
    filler.close()
    executor.infer()
    assert conversation.state is State.READY


def test_a_batch_is_saved_and_opened_whole(executor: Executor, tmp_path: Path) -> None:
    ready, waiting, cut, loaded = (executor.create() for _ in range(4))
    ready.prompt("ready", all_logits=True)
    cut.prompt("cut back")
    executor.infer()
    cut.rewind(3)
    waiting.prompt("waiting")
    executor.save(tmp_path / "batch")
    with Executor.open(tmp_path / "batch", **_SMALL) as other:  # type: ignore[arg-type]
        copies = other.conversations
        assert [one.state for one in copies] == [State.READY, State.PENDING, State.IDLE, State.IDLE]
        assert [one.text for one in copies] == ["ready", "waiting", "cut b", ""]
        assert [one.held for one in copies] == [ready.held, 0, cut.held, 0]
        assert np.array_equal(copies[0].logits(3), ready.logits(3))
        assert _written(copies[0], 8) == _written(ready, 8)
        assert _written(copies[1], 8) == _written(waiting, 8)
    with pytest.raises(caravan.StateError, match="a batch of 4 conversations"):
        executor.load(tmp_path / "batch")
    assert loaded.token_count == 0


def test_cells_that_forks_share_are_saved_once_and_shared_again(executor: Executor, tmp_path: Path) -> None:
    root = executor.create()
    root.prompt(list(range(40)))
    _infer_all(executor)
    for number in range(3):
        root.fork().prompt([number])
    executor.infer()
    backend = executor.backend
    assert isinstance(backend, ToyBackend)
    executor.save(tmp_path / "batch")
    saved = decode((tmp_path / "batch").read_bytes()).conversations
    assert [one.cells.nbytes for one in saved] == [40 * 8, 8, 8, 8]
    with Executor.open(tmp_path / "batch", **_SMALL) as other:  # type: ignore[arg-type]
        opened = other.backend
        assert isinstance(opened, ToyBackend)
        assert (backend.cache.used, opened.cache.used) == (43, 43)
        for copy, conversation in zip(other.conversations, executor.conversations, strict=True):
            assert copy.held == conversation.held
            assert _written(copy, 3) == _written(conversation, 3)


def test_a_cut_conversation_asks_for_its_logits_alone(executor: Executor) -> None:
    conversation = executor.create()
    conversation.prompt("cut back")
    executor.infer()
    conversation.rewind(1)
    conversation.prompt([], all_logits=True)
    executor.infer()
    assert conversation.sample().id == int(conversation.logits().argmax())
    with pytest.raises(IndexError):
        conversation.logits(1)


def test_where_the_cells_do_not_fit_tokens_are_computed_again(executor: Executor) -> None:
    conversation = executor.create()
    conversation.prompt("computed once")
    executor.infer()
    saved = conversation.save()
    with _executor() as other:
        other.backend.contents.state_fingerprint = "another"
        copy = other.load(saved)
        assert (copy.state, copy.held) == (State.READY, 0)
        assert np.array_equal(copy.logits(), conversation.logits())
        assert _written(copy, 8) == _written(conversation, 8)


def test_a_damaged_or_foreign_file_is_refused(executor: Executor, tmp_path: Path) -> None:
    conversation = executor.create()
    conversation.prompt("saved")
    executor.infer()
    saved = conversation.save(tmp_path / "one")
    assert (tmp_path / "one").read_bytes() == saved
    assert executor.load(tmp_path / "one").text == "saved"
    before = len(executor.conversations)
    for at in (*range(0, len(saved), 37), len(saved) - 1):
        flipped = bytearray(saved)
        flipped[at] ^= 1
        for damaged in (bytes(flipped), saved[:at]):
            with pytest.raises(caravan.StateError):
                executor.load(damaged)
    for data in (b"", b"GGUF" * 100, saved + b"x"):
        with pytest.raises(caravan.StateError):
            executor.load(data)
    other = Executor("other.gguf", backend="fake", ctx_size=64)
    with other, pytest.raises(caravan.StateError, match="belongs to another model"):
        other.load(saved)
    with _executor(ctx_size=4) as smaller, pytest.raises(caravan.StateError, match="at most 4 tokens"):
        smaller.load(saved)
    assert len(executor.conversations) == before


def _picture(text: str) -> Picture:
    return Picture.of(*spelled_picture(text))


def _sound(text: str) -> Sound:
    return Sound.of(16_000, spelled_sound(text))


def _media_executor(kind: str = "toy", **options: Any) -> Executor:
    return Executor("toy", backend="fake", mmproj=kind, **options)


def _generated(conversation: Conversation, count: int = 12) -> list[int]:
    return [token.id for token in conversation.generate(count, stop=lambda _: False)]


def _words(executor: Executor, text: str) -> Conversation:
    conversation = executor.create()
    conversation.prompt(text)
    return conversation


_PARTS = ("see ", _picture("a cat"), " hear ", _sound("a dog"), _picture("!" * 70), "?")
_TEXT = f"see a cat hear a dog{'!' * 70}?"


# A slice of the toy has 64 cells, which must fit into a step if it cannot be cut.
@pytest.mark.parametrize(
    ("kind", "batch"), [("toy", 16), ("toy", 80), ("toy", 512), ("toy-atomic", 80), ("toy-atomic", 512)]
)
def test_parts_of_a_prompt_are_read_as_what_they_spell(kind: str, batch: int) -> None:
    with _media_executor(kind, batch_size=batch) as executor:
        shown = executor.create()
        shown.prompt(list(_PARTS))
        words = _words(executor, _TEXT)
        assert shown.token_count == words.token_count
        assert _generated(shown) == _generated(words)
        assert np.array_equal(shown.logits(), words.logits())
        assert shown.text == words.text.replace(_TEXT, "see  hear ?")


def test_media_are_forgotten_with_their_conversations_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    count, kept = 32, list[int]()
    with _media_executor() as executor:
        shown = [executor.create() for _ in range(count)]
        for number, conversation in enumerate(shown):
            conversation.prompt(_picture(f"cat {number}"))
        first, keep = shown[0].tokens, executor.media.keep

        def counted(texts: Iterable[Sequence[int]]) -> None:
            found = list(texts)
            kept.append(len(found))
            keep(found)

        monkeypatch.setattr(executor.media, "keep", counted)
        for conversation in shown[:-1]:
            conversation.close()
        assert sum(kept) <= 2 * count
        assert executor.media.used_in([shown[-1].tokens]) == [_picture(f"cat {count - 1}")]
        with pytest.raises(RequestError, match="no conversation has an image"):
            executor.media.check(first)


def test_a_picture_can_come_first_and_alone() -> None:
    with _media_executor() as executor:
        shown = executor.create()
        shown.prompt(_picture("cat"))
        executor.infer()
        words = _words(executor, "cat")
        executor.infer()
        assert np.array_equal(shown.logits(), words.logits())


class _Pillow:
    """What Pillow's pictures have."""

    def __init__(self, picture: Picture) -> None:
        self.size = (picture.width, picture.height)
        self._picture = picture

    def convert(self, mode: str) -> "_Pillow":
        assert mode == "RGB"
        return self

    def tobytes(self) -> bytes:
        return self._picture.rgb


def test_a_picture_of_pillow_is_taken() -> None:
    with _media_executor() as executor:
        shown = executor.create()
        shown.prompt(["a ", _Pillow(_picture("cat"))])
        assert _generated(shown) == _generated(_words(executor, "a cat"))


@pytest.mark.parametrize("kind", ["toy", "toy-atomic"])
def test_forks_edits_and_rewinds_keep_the_pictures(kind: str) -> None:
    with _media_executor(kind) as executor:
        shown = executor.create()
        shown.prompt(["see ", _picture("a cat"), " and "])
        executor.infer()
        fork = shown.fork()
        fork.prompt("more")
        assert _generated(fork) == _generated(_words(executor, "see a cat and more"))
        shown.rewind(5)
        shown.prompt([_picture("a dog"), "!"])
        assert _generated(shown) == _generated(_words(executor, "see a cata dog!"))
        fork.shift_left(4, keep=1)
        tokens = fork.tokens
        words = executor.create()
        words.prompt(tokens)
        executor.infer()
        assert np.array_equal(fork.logits(), words.logits())
        fork.unload()
        fork.prompt("again")
        executor.infer()


@pytest.mark.parametrize("kind", ["toy", "toy-atomic"])
def test_an_image_is_removed_by_its_name_or_its_place(kind: str) -> None:
    cat, dog = _picture("a cat"), _sound("a dog" * 20)
    with _media_executor(kind) as executor:
        shown = executor.create()
        shown.prompt(["see ", cat, " hear ", dog, " see ", cat, "!"])
        with pytest.raises(caravan.NeedsInfer):
            shown.remove(cat)
        executor.infer()
        assert [one.media for one in shown.media] == [cat, dog, cat]
        first = shown.media[0]
        assert (first.start, first.stop - first.start) == (5, len(executor.media.tokens_of(cat)))
        shown.remove(first)
        executor.infer()
        assert _generated(shown.fork()) == _generated(_words(executor, f"see  hear {'a dog' * 20} see a cat!"))
        with pytest.raises(ValueError, match="does not have this image or audio there"):
            shown.remove(first)
        fork = shown.fork()
        shown.remove(dog)
        executor.infer()
        shown.remove(_Pillow(cat))
        executor.infer()
        assert (shown.media, [one.media for one in fork.media]) == ([], [dog, cat])
        assert _generated(shown) == _generated(_words(executor, "see  hear  see !"))


def test_an_image_is_removed_with_the_tokens_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with _media_executor() as executor:
        encoder = executor.backend.media
        assert encoder is not None
        layout = encoder.tokenize
        monkeypatch.setattr(encoder, "tokenize", lambda shape: [[60], *layout(shape), [62]])
        shown = executor.create()
        shown.prompt(["<see", _picture("a cat"), _picture("!" * 150), ">"])
        executor.infer()
        tokens = shown.tokens
        assert [tokens[one.start] for one in shown.media] == [60, 60]
        assert [tokens[one.stop - 1] for one in shown.media] == [62, 62]
        shown.remove(_picture("!" * 150))
        executor.infer()
        shown.remove(_picture("a cat"))
        assert shown.tokens == executor.tokenize("<see>")


def test_of_an_image_that_was_cut_the_rest_is_removed() -> None:
    with _media_executor() as executor:
        shown = executor.create()
        shown.prompt(["see ", _picture("a cat" * 30)])
        executor.infer()
        shown.rewind(30)
        shown.prompt("!")
        executor.infer()
        shown.remove(shown.media[0].media)
        executor.infer()
        assert _generated(shown) == _generated(_words(executor, "see !"))


def test_part_of_a_picture_is_left_only_where_it_may_be_cut() -> None:
    for kind in ("toy", "toy-atomic"):
        with _media_executor(kind) as executor:
            shown = executor.create()
            shown.prompt(["see ", _picture("a cat")])
            executor.infer()
            if kind == "toy-atomic":
                with pytest.raises(RequestError, match="as a whole"):
                    shown.rewind(2)
                continue
            shown.rewind(2)
            shown.prompt("t!")
            assert _generated(shown) == _generated(_words(executor, "see a ct!"))


@pytest.mark.parametrize("kind", ["toy", "toy-atomic"])
def test_saved_conversations_have_their_pictures(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    with _media_executor(kind) as executor:
        shown = executor.create()
        shown.prompt(list(_PARTS))
        executor.infer()
        unheld = shown.fork()
        unheld.prompt([_picture("a cow")])
        unheld.unload()
        executor.save(path)
        one = shown.save()
    with Executor.open(path, "toy", backend="fake", mmproj=kind) as executor:
        first, second = executor.conversations
        assert first.tokens == executor.load(one).tokens
        assert _generated(first) == _generated(_words(executor, _TEXT))
        assert _generated(second) == _generated(_words(executor, f"{_TEXT}a cow"))
        first.prompt(_picture("a cat"))
        executor.infer()
    with Executor("toy", backend="fake") as executor, pytest.raises(StateError, match="projector"):
        executor.load(one)


def test_a_model_without_a_projector_refuses_pictures() -> None:
    with Executor("toy", backend="fake") as executor:
        conversation = executor.create()
        with pytest.raises(RequestError, match="does not read images"):
            conversation.prompt(_picture("cat"))
        with pytest.raises(RequestError, match="does not read audio"):
            conversation.prompt(["a", _sound("cat")])
        assert conversation.tokens == []


def test_the_cells_of_a_picture_that_is_gone_are_unknown() -> None:
    with _media_executor() as executor:
        shown = executor.create()
        shown.prompt(["a ", _picture("cat")])
        executor.infer()
        tokens = shown.tokens
        shown.close()
        with pytest.raises(RequestError, match="no conversation has"):
            executor.create().prompt(tokens)
