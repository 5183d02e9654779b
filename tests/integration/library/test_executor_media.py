"""Conversations stepped by hand with pictures and sounds: logits and tokens are those of the text that they spell."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan import Conversation, Executor, Picture, RequestError, Sound, StateError
from caravan_testing.toy_media import spelled_picture, spelled_sound


def _picture(text: str) -> Picture:
    return Picture.of(*spelled_picture(text))


def _sound(text: str) -> Sound:
    return Sound.of(16_000, spelled_sound(text))


def _executor(kind: str = "toy", **options: Any) -> Executor:
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
    with _executor(kind, batch_size=batch) as executor:
        shown = executor.create()
        shown.prompt(list(_PARTS))
        words = _words(executor, _TEXT)
        assert shown.token_count == words.token_count
        assert _generated(shown) == _generated(words)
        assert np.array_equal(shown.logits(), words.logits())
        assert shown.text == words.text.replace(_TEXT, "see  hear ?")


def test_a_picture_can_come_first_and_alone() -> None:
    with _executor() as executor:
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
    with _executor() as executor:
        shown = executor.create()
        shown.prompt(["a ", _Pillow(_picture("cat"))])
        assert _generated(shown) == _generated(_words(executor, "a cat"))


@pytest.mark.parametrize("kind", ["toy", "toy-atomic"])
def test_forks_edits_and_rewinds_keep_the_pictures(kind: str) -> None:
    with _executor(kind) as executor:
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


def test_part_of_a_picture_is_left_only_where_it_may_be_cut() -> None:
    for kind in ("toy", "toy-atomic"):
        with _executor(kind) as executor:
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
    with _executor(kind) as executor:
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
    with _executor() as executor:
        shown = executor.create()
        shown.prompt(["a ", _picture("cat")])
        executor.infer()
        tokens = shown.tokens
        shown.close()
        with pytest.raises(RequestError, match="no conversation has"):
            executor.create().prompt(tokens)
