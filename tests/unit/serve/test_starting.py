"""For how long requests wait while `caravan serve` starts a shard."""

import math
from dataclasses import dataclass, field
from typing import Any, cast

from caravan_scheduler.core.shards import ShardReport, ShardStanding, ShardState
from caravan_serve.starting import Starting

GRACE_S = 30.0


@dataclass
class Shard:
    address: str
    is_starting: bool = True


@dataclass
class Models:
    """Stands in for the fleet: states of shards by address, and how long requests wait by the name of their model."""

    states: dict[str, tuple[ShardState, str]] = field(default_factory=dict)
    patience: dict[str, float] = field(default_factory=dict)

    def shards(self) -> list[ShardReport]:
        return [
            ShardReport(address=address, standing=ShardStanding(state=state, since_s=0.0), epoch=0, model=model)
            for address, (state, model) in self.states.items()
        ]

    @property
    def demand(self) -> "Models":
        return self

    def set_absence(self, name: str, absence: Any) -> None:
        self.patience[name] = absence.grace_s


def starting(models: Models, shards: dict[str, list[Shard]]) -> Starting:
    return Starting(cast("Any", models), cast("Any", shards), GRACE_S)


def test_requests_wait_until_the_router_holds_the_shard() -> None:
    models, shard = Models({"a": (ShardState.JOINING, "")}), Shard("a")
    watch = starting(models, {"": [shard]})
    watch.update(0.0)
    watch.update(1000.0)
    assert models.patience == {"": math.inf}
    shard.is_starting = False
    watch.update(1029.0)
    assert models.patience == {"": math.inf}, "it listens, and has not joined yet"
    models.states["a"] = (ShardState.SERVING, "chat")
    watch.update(1029.5)
    assert models.patience == {"": GRACE_S}


def test_the_restart_of_a_shard_counts_for_the_name_of_its_model_too() -> None:
    models, shard = Models({"a": (ShardState.SERVING, "chat")}), Shard("a", is_starting=False)
    watch = starting(models, {"": [shard]})
    watch.update(0.0)
    assert models.patience == {}
    models.states["a"] = (ShardState.LOST, "chat")
    shard.is_starting = True
    watch.update(1.0)
    assert models.patience == {"": math.inf, "chat": math.inf}
    models.states["a"] = (ShardState.SERVING, "chat")
    shard.is_starting = False
    watch.update(2.0)
    assert models.patience == {"": GRACE_S, "chat": GRACE_S}


def test_a_shard_that_listens_and_never_joins_is_not_waited_for_for_ever() -> None:
    models, shard = Models({"a": (ShardState.JOINING, "")}), Shard("a")
    watch = starting(models, {"": [shard]})
    watch.update(0.0)
    shard.is_starting = False
    watch.update(29.0)
    assert models.patience == {"": math.inf}
    watch.update(30.0)
    assert models.patience == {"": GRACE_S}


def test_each_model_is_waited_for_by_itself() -> None:
    models = Models({"a": (ShardState.SERVING, "x"), "b": (ShardState.JOINING, ""), "c": (ShardState.JOINING, "")})
    first, second, third = Shard("a", is_starting=False), Shard("b"), Shard("c")
    watch = starting(models, {"x": [first], "y": [second, third]})
    watch.update(0.0)
    assert models.patience == {"y": math.inf}
    second.is_starting = False
    models.states["b"] = (ShardState.SERVING, "y")
    watch.update(1.0)
    assert models.patience == {"y": math.inf}, "one serves, and the other one may be needed"
    third.is_starting = False
    models.states["c"] = (ShardState.SERVING, "y")
    watch.update(2.0)
    assert models.patience == {"y": GRACE_S}
