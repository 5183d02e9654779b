"""Server-sent events are found however their bytes are split."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from caravan_serve.bench.client_sse import SseParser

STREAM = 'data: {"text":"caf\u00e9"}\n\n: keep-alive\n\nevent: x\ndata:{"b":2}\r\n\r\ndata: [DONE]\n\n'.encode()
EVENTS = ['{"text":"caf\u00e9"}'.encode(), b'{"b":2}', b"[DONE]"]


def test_a_whole_stream_gives_all_events() -> None:
    assert SseParser().feed(STREAM) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split_gives_the_same_events(cuts: list[int]) -> None:
    parser = SseParser()
    borders = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[begin:end] for begin, end in pairwise(borders)]
    assert [data for piece in pieces for data in parser.feed(piece)] == EVENTS


def test_an_unfinished_line_is_not_an_event() -> None:
    parser = SseParser()
    assert parser.feed(b'data: {"a"') == []
    assert parser.feed(b":1}\n") == [b'{"a":1}']
