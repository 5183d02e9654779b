"""However text is cut into tokens, a client gets the same of it."""

from hypothesis import given
from hypothesis import strategies as st

from caravan_router.core.sampling import FinishReason
from caravan_router.text.assembler import Assembler
from caravan_testing.scripted_engine import word

# Few letters, so that stop strings occur; characters of one to four bytes, a combining mark, an emoji sequence.
CHARACTERS = st.sampled_from(
    ["a", "b", "\n", "é", "e\N{COMBINING ACUTE ACCENT}", "한", "🙂", "👩\N{ZERO WIDTH JOINER}🚀"]
)
TEXTS = st.lists(CHARACTERS, max_size=12).map("".join)
BYTES = st.lists(st.one_of(TEXTS.map(str.encode), st.binary(max_size=3)), max_size=5).map(b"".join)
STOPS = st.lists(st.lists(CHARACTERS, min_size=1, max_size=4).map("".join), max_size=4)


def reference(raw: bytes, stops: list[str]) -> tuple[str, bool]:
    """What to expect, from the whole text at once."""
    text = raw.decode("utf-8", "replace")
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


@given(raw=BYTES, stops=STOPS, data=st.data())
def test_streamed_text_is_the_text_before_the_first_stop_string(
    raw: bytes, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)))
    tokens = [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    expected, stopped = reference(raw, stops)
    assembler = Assembler(stops)
    pieces = []
    released = ""
    for number, token in enumerate(tokens):
        finish = FinishReason.LENGTH if number == len(tokens) - 1 else None
        pieces.extend(assembler.push(word(token, number, finish=finish)))
        released = "".join(piece.text for piece in pieces)
        assert expected.startswith(released)
        if pieces and pieces[-1].finish is not None:
            break
    assert released == expected
    assert not any(stop in released for stop in stops)
    assert pieces[-1].finish is (FinishReason.STOP_SEQUENCE if stopped else FinishReason.LENGTH)
    assert [piece.token.token_id for piece in pieces] == list(range(len(pieces)))
    assert [piece for piece in pieces if piece.finish] == [pieces[-1]]
