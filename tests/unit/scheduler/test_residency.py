"""Which models are loaded and unloaded, and in which order."""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_scheduler.residency import HOST, Load, ModelNeed, NoPlace, Phase, Room, TooLarge, Unload, plan

TURN_S = 10.0
ONE = Room(max_models=1)


def cold(name: str, wanted_since_s: float | None = None, **facts: object) -> ModelNeed:
    return ModelNeed(name=name, phase=Phase.COLD, since_s=0.0, wanted_since_s=wanted_since_s, **facts)  # type: ignore[arg-type]


def loaded(name: str, **facts: object) -> ModelNeed:
    return ModelNeed(name=name, phase=Phase.LOADED, **({"since_s": 0.0} | facts))  # type: ignore[arg-type]


def test_nobody_wants_anything() -> None:
    assert plan([cold("a"), loaded("b")], ONE, TURN_S, 100.0) == []


def test_the_model_that_was_wanted_first_is_loaded_first() -> None:
    assert plan([cold("a", 5.0), cold("b", 3.0), cold("c")], ONE, TURN_S, 6.0) == [Load("b")]


@pytest.mark.parametrize("phase", [Phase.LOADING, Phase.UNLOADING])
def test_nothing_is_loaded_beside_a_load_or_an_unload(phase: Phase) -> None:
    busy = ModelNeed(name="a", phase=phase, since_s=0.0)
    assert plan([busy, cold("b", 0.0)], Room(), TURN_S, 100.0) == []


def test_a_model_without_requests_leaves_at_once_unless_it_was_just_loaded() -> None:
    models = [loaded("a", since_s=2.0), cold("b", 0.0)]
    assert plan(models, ONE, TURN_S, 2.9) == []
    assert plan(models, ONE, TURN_S, 3.0) == [Unload("a")]


def test_a_model_with_requests_leaves_after_its_turn() -> None:
    models = [loaded("a", is_busy=True, since_s=2.0), cold("b", 1.0)]
    assert plan(models, ONE, TURN_S, 11.9) == []
    assert plan(models, ONE, TURN_S, 12.0) == [Unload("a")]


def test_a_turn_takes_as_long_as_the_load_before_it() -> None:
    models = [loaded("a", is_busy=True, since_s=0.0, load_s=60.0), cold("b", 0.0)]
    assert plan(models, ONE, TURN_S, 59.0) == []
    assert plan(models, ONE, TURN_S, 60.0) == [Unload("a")]


def test_what_is_pinned_stays() -> None:
    assert plan([loaded("a", is_pinned=True), cold("b", 0.0)], ONE, TURN_S, 99.0) == [NoPlace("b", 1)]


def test_a_model_that_could_never_fit_is_refused() -> None:
    models = [loaded("a", bytes_at={HOST: 30}), loaded("b", bytes_at={HOST: 20}, is_pinned=True), cold("c", 0.0)]
    models[2] = replace(models[2], bytes_at={HOST: 81, "gpu": 1})
    assert plan(models, Room(free_at={HOST: 50}), TURN_S, 0.0) == [TooLarge("c", HOST, 81, 80)]


def test_the_least_valuable_models_leave_and_no_more_than_needed() -> None:
    models = [
        loaded("dear", bytes_at={HOST: 40}, load_s=60.0, used_s=10.0),
        loaded("small", bytes_at={HOST: 10}, load_s=1.0, used_s=10.0),
        loaded("old", bytes_at={HOST: 30}, load_s=2.0, used_s=0.0),
        cold("wanted", 50.0, bytes_at={HOST: 35}),
    ]
    # By cost for each second without use: small (1/90), old (2/100), dear (60/90). Without small, old makes room.
    assert plan(models, Room(free_at={HOST: 5}), TURN_S, 100.0) == [Unload("old")]
    assert plan(models, Room(free_at={HOST: 35}), TURN_S, 100.0) == [Load("wanted")]


def test_a_model_that_fits_beside_is_loaded_while_an_earlier_one_waits_for_its_turn() -> None:
    models = [
        loaded("a", bytes_at={HOST: 80}, is_busy=True),
        cold("large", 0.0, bytes_at={HOST: 50}),
        cold("small", 1.0, bytes_at={HOST: 20}),
    ]
    assert plan(models, Room(free_at={HOST: 20}), TURN_S, 2.0) == [Load("small")]


def test_a_model_leaves_after_it_was_idle_for_as_long_as_it_is_kept() -> None:
    models = [loaded("a", keep_s=5.0, used_s=10.0), loaded("b", keep_s=5.0, used_s=10.0, is_busy=True)]
    assert plan(models, Room(), TURN_S, 14.9) == []
    assert plan(models, Room(), TURN_S, 15.0) == [Unload("a")]
    assert plan([replace(models[0], is_pinned=True)], Room(), TURN_S, 99.0) == []


# Many models at the edge of memory, in virtual time

LOAD_S, STEP_S, SERVE_S = 3.0, 0.5, 1.0


@dataclass
class _Model:
    """A model of the simulated host. ``queue``: when its requests arrived. One is served each `SERVE_S`."""

    need: ModelNeed
    queue: list[float] = field(default_factory=list)
    ends_s: float = 0.0
    longest_wait_s: float = 0.0


@given(
    sizes=st.lists(st.integers(1, 10), min_size=2, max_size=5),
    arrivals=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 60)), min_size=1, max_size=60),
)
def test_memory_always_suffices_and_nobody_is_overtaken_for_longer_than_the_bound(
    sizes: list[int], arrivals: list[tuple[int, int]]
) -> None:
    capacity = max(sizes) + 2
    models = [
        _Model(ModelNeed(name=str(number), phase=Phase.COLD, since_s=0.0, bytes_at={HOST: size}))
        for number, size in enumerate(sizes)
    ]
    coming = sorted((float(when), number % len(sizes)) for number, when in arrivals)
    bound_s = (len(sizes) - 1) * (max(TURN_S, LOAD_S) + LOAD_S + 2 * STEP_S) + LOAD_S + 4 * STEP_S
    now, served = 0.0, 0
    while served < len(arrivals):
        assert now < 60 + len(arrivals) * (SERVE_S + bound_s), "somebody waits for ever"
        while coming and coming[0][0] <= now:
            when, number = coming.pop(0)
            models[number].queue.append(when)
        for model in models:
            served += _advance(model, now)
        taken = sum(one.need.bytes_at[HOST] for one in models if one.need.phase is not Phase.COLD)
        assert taken <= capacity
        assert sum(one.need.phase in (Phase.LOADING, Phase.UNLOADING) for one in models) <= len(models)
        room = Room(free_at={HOST: capacity - taken})
        for step in plan([one.need for one in models], room, TURN_S, now):
            assert isinstance(step, Load | Unload)
            model = models[int(step.name)]
            phase = Phase.LOADING if isinstance(step, Load) else Phase.UNLOADING
            model.need = replace(model.need, phase=phase, since_s=now)
            model.ends_s = now + (LOAD_S if isinstance(step, Load) else STEP_S)
        now += STEP_S
    assert max(model.longest_wait_s for model in models) <= bound_s


def _advance(model: _Model, now: float) -> int:
    """Let half a second pass for one model; return how many requests it has served."""
    need, served = model.need, 0
    if need.phase is Phase.LOADING and now >= model.ends_s:
        need = replace(need, phase=Phase.LOADED, since_s=now, load_s=LOAD_S, used_s=now)
        model.ends_s = now
    elif need.phase is Phase.UNLOADING and now >= model.ends_s:
        need = replace(need, phase=Phase.COLD, since_s=now)
    if need.phase is Phase.LOADED and model.queue and now >= model.ends_s:
        model.queue.pop(0)
        model.ends_s, served = now + SERVE_S, 1
    waits = need.phase is Phase.COLD and bool(model.queue)
    since = (now if need.wanted_since_s is None else need.wanted_since_s) if waits else None
    if since is not None:
        model.longest_wait_s = max(model.longest_wait_s, now - since)
    is_busy = bool(model.queue)
    model.need = replace(need, wanted_since_s=since, is_busy=is_busy, used_s=now if is_busy else need.used_s)
    return served
