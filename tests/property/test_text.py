"""However text is split into tokens, a client gets the same text."""

import codecs
from dataclasses import dataclass, replace

from hypothesis import given
from hypothesis import strategies as st

from caravan_dialects.text.assembler import Assembler, Piece, TextOptions
from caravan_proto.messages.results import FinishReason
from caravan_testing.scripted_engine import word

# Few letters, so that stop strings occur; characters of one to four bytes, a combining mark, an emoji sequence.
LETTERS = ["a", "b"]
CHARACTERS = [*LETTERS, "\n", "é", "e\N{COMBINING ACUTE ACCENT}", "한", "🙂", "👩\N{ZERO WIDTH JOINER}🚀"]


@dataclass(frozen=True)
class Output:
    """What a model says: the bytes of each token, and whether it is a control token."""

    tokens: tuple[tuple[bytes, bool], ...]

    def text(self, options: TextOptions, tokens: int | None = None, *, ended: bool = True) -> str:
        """The text of the first ``tokens`` tokens, decoded at once. Unless ``ended``, without half a character."""
        shown = (raw for raw, special in self.tokens[:tokens] if options.special_text or not special)
        return codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(shown), ended)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Output, TextOptions]:
    """An output, and options whose stop strings are random, parts of its text, or begin as a part of it does."""
    characters = st.sampled_from(draw(st.sampled_from([LETTERS, CHARACTERS])))
    texts = st.lists(characters, max_size=12).map("".join)
    raw = b"".join(draw(st.lists(st.one_of(texts.map(str.encode), st.binary(max_size=3)), max_size=5)))
    cuts = sorted(draw(st.sets(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    output = Output(tuple((piece, draw(st.integers(0, 5)) == 0) for piece in pieces))
    options = TextOptions(
        keep_stop=draw(st.booleans()), special_text=draw(st.booleans()), min_tokens=draw(st.integers(0, 4))
    )
    text = output.text(options)
    places = st.tuples(st.integers(0, len(text)), st.integers(0, 4)).map(lambda place: text[place[0] :][: place[1]])
    stops = st.one_of(
        st.lists(characters, min_size=1, max_size=4).map("".join),
        places.filter(bool),
        st.tuples(places, characters).map("".join),
    )
    return output, replace(options, stops=tuple(draw(st.lists(stops, max_size=4))))


def reference(output: Output, options: TextOptions) -> tuple[str, bool]:
    """The expected text, found in the whole text at once, and whether a stop string ends it."""
    text = output.text(options)
    counted_from = 0
    if options.min_tokens:
        ended = len(output.tokens) <= options.min_tokens
        counted_from = len(output.text(options, options.min_tokens, ended=ended))
    matches = [
        (start + len(stop), start)
        for stop in options.stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > counted_from
    ]
    if not matches:
        return text, False
    end, start = min(matches)
    return text[: end if options.keep_stop else start], True


def push(assembler: Assembler, output: Output, number: int) -> list[Piece]:
    raw, special = output.tokens[number]
    finish = FinishReason.LENGTH if number == len(output.tokens) - 1 else None
    return assembler.push(word(raw, number, finish=finish, special=special))


@given(case=cases())
def test_streamed_text_is_the_whole_text_up_to_the_first_stop_string(case: tuple[Output, TextOptions]) -> None:
    output, options = case
    expected, stopped = reference(output, options)
    assembler = Assembler(options)
    pieces: list[Piece] = []
    released = ""
    for number in range(len(output.tokens)):
        pieces.extend(push(assembler, output, number))
        released = "".join(piece.text for piece in pieces)
        assert expected.startswith(released)
        if pieces and pieces[-1].finish is not None:
            break
    assert released == expected
    assert options.keep_stop or options.min_tokens or not any(stop in released for stop in options.stops)
    assert pieces[-1].finish is (FinishReason.STOP_SEQUENCE if stopped else FinishReason.LENGTH)
    assert [piece.token.token_id for piece in pieces] == list(range(len(pieces)))
    assert [piece for piece in pieces if piece.finish] == [pieces[-1]]


@given(case=cases(), data=st.data())
def test_a_flush_after_any_token_loses_nothing(case: tuple[Output, TextOptions], data: st.DataObject) -> None:
    output, options = case
    count = data.draw(st.integers(0, len(output.tokens) - 1))
    assembler = Assembler(options)
    pieces: list[Piece] = []
    for number in range(count):
        pieces.extend(push(assembler, output, number))
        if pieces and pieces[-1].finish is not None:
            # A stop string has ended the text: nothing is left to flush.
            assert assembler.flush() == []
            return
    released = len(pieces)
    pieces.extend(assembler.flush())
    assert "".join(piece.text for piece in pieces) == output.text(options, count, ended=False)
    assert [piece.token.token_id for piece in pieces] == list(range(count))
    marked = [FinishReason.LENGTH] if len(pieces) > released else []
    assert [piece.finish for piece in pieces if piece.finish] == marked
    assert not marked or pieces[-1].finish is FinishReason.LENGTH
    assert assembler.flush() == []
