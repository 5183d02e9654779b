from dataclasses import dataclass, replace
from typing import Any

import pytest

from caravan_proto.messages.model import FillTokens
from caravan_proto.messages.sampling import SamplingParams
from caravan_router.engine.replacement import can_continue, serving, tokens_mean_the_same
from caravan_scheduler.core.engine import ModelFacts
from caravan_testing.specs import spec

FACTS = ModelFacts(
    name="chat",
    fingerprint="1",
    vocabulary_size=260,
    vocabulary_fingerprint="v",
    chat_template="{{ messages }}",
    bos_text="<s>",
    eos_text="</s>",
    eos_token_ids=frozenset({257}),
    fill=FillTokens(prefix=1, suffix=2, middle=3),
    adapters=("polite", "terse"),
    max_sequence_tokens=100,
    max_top_n_tokens=5,
    max_tokenize_bytes=1000,
    total_cells=100,
)


@dataclass(frozen=True)
class Engine:
    name: str
    room: int


@pytest.mark.parametrize(
    ("rooms", "expected"),
    [
        ({"old": 24}, "old"),
        ({"old": 24, "new": 0}, "old"),
        ({"old": 16, "new": 8}, "old"),
        ({"old": 8, "new": 8}, "new"),
        ({"old": 8, "new": 16}, "new"),
        ({"old": 0, "new": 0}, "new"),
        ({"oldest": 8, "old": 0, "new": 1}, "oldest"),
    ],
)
def test_the_weights_with_more_room_serve_and_of_equal_ones_the_newer(rooms: dict[str, int], expected: str) -> None:
    assert serving([Engine(name, room) for name, room in rooms.items()]).name == expected


def test_other_weights_of_the_same_vocabulary_and_templates_continue_a_text() -> None:
    newer = replace(FACTS, fingerprint="2", quantization="Q8_0", weight_bytes=9, max_sequence_tokens=50, adapters=())
    assert tokens_mean_the_same(FACTS, newer)


@pytest.mark.parametrize(
    "changed",
    [
        {"vocabulary_fingerprint": "w"},
        {"vocabulary_size": 261},
        {"chat_template": "{{ tools }}"},
        {"tool_template": "{{ tools }}"},
        {"bos_text": ""},
        {"eos_text": "<end>"},
        {"eos_token_ids": frozenset({257, 259})},
        {"fill": None},
        {"generates": False},
        {"ranks": True},
        {"embedding_size": 8},
    ],
)
def test_tokens_of_another_vocabulary_or_template_mean_something_else(changed: dict[str, Any]) -> None:
    assert not tokens_mean_the_same(FACTS, replace(FACTS, **changed))


def test_vocabularies_that_are_not_known_are_not_equal() -> None:
    unknown = replace(FACTS, vocabulary_fingerprint="")
    assert not tokens_mean_the_same(unknown, unknown)


def test_a_request_continues_where_its_adapter_and_its_alternatives_are() -> None:
    assert can_continue(spec([1], 1), FACTS)
    assert can_continue(spec([1], 1, adapter="terse"), FACTS)
    assert not can_continue(spec([1], 1, adapter="other"), FACTS)
    for count, expected in ((5, True), (6, False)):
        wanted = replace(spec([1], 1), sampling=SamplingParams(logprobs=True, top_n_tokens=count))
        assert can_continue(wanted, FACTS) is expected
