import pytest

from caravan_router.scheduling.shard.costs import ShardCosts
from caravan_router.scheduling.transfers import Transfers
from caravan_shard.backends.toy.media import ToyEncoder
from caravan_testing import cluster
from caravan_testing.shown_prompts import show_all, toy_shower

# Modules of which each test of text is also one of pictures: its prompts are shown in part, which changes no output.
_SHOWN = (
    "test_beams",
    "test_conversation_trees",
    "test_handover",
    "test_migration",
    "test_preemption",
    "test_saved_prefixes",
    "test_speculation",
)
_WORDS, _PICTURES, _WHOLE = "words", "pictures", "whole pictures"
# What they count is another number with pictures: prompts that were generated as text are shown the next time, or
# prefixes end before a picture.
_COUNTING = {
    "test_a_fork_of_a_response_under_way_starts_from_what_was_generated": (_PICTURES, _WHOLE),
    "test_equal_prompts_take_the_cells_of_their_prefix_once_when_new_and_from_memory": (_WHOLE,),
    "test_prompts_of_which_each_has_more_in_memory_take_the_cells_of_the_common_part_once": (_WHOLE,),
}
_LONG = (
    "test_a_tree_of_conversations_generates_what_its_items_do",
    "test_two_hundred_requests_have_the_output_that_they_have_without",
    "test_sequences_move_while_they_are_generated",
    "test_log_probabilities_are_those_without_drafts",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2] not in _SHOWN:
        return
    name = metafunc.function.__name__
    kinds = [kind for kind in (_PICTURES, _WHOLE) if kind not in _COUNTING.get(name, ())]
    shown_as = [pytest.param(kind, marks=pytest.mark.slow) if _is_long(name, kind) else kind for kind in kinds]
    metafunc.parametrize("prompts", [_WORDS, *shown_as], indirect=True)


def _is_long(name: str, kind: str) -> bool:
    """Whether this is left to `make test-slow`. One of both kinds of pictures is enough for `make test`."""
    return name in _LONG or kind == _WHOLE


@pytest.fixture(autouse=True)
def prompts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let prompts be texts, or show parts of them as pictures, which may be cut or must be computed whole."""
    kind = getattr(request, "param", _WORDS)
    if kind == _WORDS:
        return
    monkeypatch.setattr(cluster, "default_encoder", lambda: ToyEncoder(atomic=kind == _WHOLE))
    show_all(monkeypatch, toy_shower(atomic=kind == _WHOLE))


@pytest.fixture
def copies_cost_as_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies and transfers cost what the router guesses before the first, whatever a busy machine would measure.

    A step takes at least its sleep, so swapping and moving are always faster than computing again.
    """
    monkeypatch.setattr(ShardCosts, "observe_copy", lambda *_, **__: None)
    monkeypatch.setattr(Transfers, "_learn", lambda *_, **__: None)
