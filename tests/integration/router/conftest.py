import pytest

from caravan_scheduler.shard.costs import ShardCosts
from caravan_scheduler.transfers import Transfers
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
# Whose pictures `make test` tries. The others differ in what the scheduler does, not in what it does with media.
_SHOWN_IN_EACH_RUN = ("test_beams", "test_handover", "test_saved_prefixes")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    module, name = metafunc.module.__name__.rpartition(".")[2], metafunc.function.__name__
    if module not in _SHOWN:
        return
    kinds = [kind for kind in (_PICTURES, _WHOLE) if kind not in _COUNTING.get(name, ())]
    shown_as = [pytest.param(kind, marks=pytest.mark.slow) if _is_slow(module, kind) else kind for kind in kinds]
    metafunc.parametrize("prompts", [_WORDS, *shown_as], indirect=True)


def _is_slow(module: str, kind: str) -> bool:
    """Whether this is left to `make test-more`. One of both kinds of pictures is enough for `make test`."""
    return module not in _SHOWN_IN_EACH_RUN or kind == _WHOLE


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
