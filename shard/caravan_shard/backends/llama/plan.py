"""Plans a load: fills in what the flags leave open, and compares what it takes with what is free."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from caravan_proto.host_memory import available_memory, own_memory
from caravan_shard.backends.base import StartupError
from caravan_shard.backends.llama.devices import Device
from caravan_shard.backends.llama.fit import ALL_LAYERS, Choice, best, choices, leaves_margins
from caravan_shard.backends.llama.measure import Measured, measure
from caravan_shard.config import ShardConfig
from caravan_shard.memory_need import HOST, FreeMemory, MemoryNeed, in_words, shortage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """``config`` has no open choices. ``devices``: all that there are. ``free``: of those that it may use.

    ``experts_on_host``: number of layers whose experts lie there, but for what --override-tensor does.
    """

    config: ShardConfig
    devices: Sequence[Device]
    measured: Measured
    free: FreeMemory
    experts_on_host: int

    @property
    def layers(self) -> int:
        """Number of layers with the output layer."""
        return self.measured.shape.layers + 1

    @property
    def gpu_layers(self) -> int:
        """How many of them lie on devices."""
        given = self.config.gpu_layers
        if given is None or not self.config.uses_gpus or not self.free.devices:
            return 0
        return self.layers if given == ALL_LAYERS else min(given, self.layers)

    @property
    def problem(self) -> str | None:
        """What does not fit, in one line; None if all does, or if that is unknown."""
        if self.measured.need is None:
            return None
        of_host = self.measured.need.by_place[HOST]
        # Other models of this process have their own.
        taken = min(own_memory(), of_host.get("program", 0) + of_host.get("vocabulary", 0))
        return shortage(Path(self.config.model).name, self.measured.need, self.free, taken=taken)


def plan_load(config: ShardConfig, devices: Sequence[Device]) -> LoadPlan:
    """Return how to load what ``config`` names. Raises StartupError if a file or a device is not there.

    ``devices``: all that there are, as they were a moment ago.
    """
    names = config.device_names
    usable = [device for device in devices if names is None or device.name in names]
    free = FreeMemory(host=available_memory(), devices={device.name: device.free_bytes for device in usable})
    # Each takes as long as reading the vocabulary, and some choices are looked at twice.
    measured_with = cache(partial(measure, devices=devices))
    choice = _choose(config, free, measured_with)
    config = choice.apply(config)
    measured = measured_with(config)
    layers = measured.shape.layers if measured.shape.has_experts else 0
    given = layers if config.cpu_moe else min(layers, config.n_cpu_moe)
    plan = LoadPlan(
        config=config,
        devices=devices,
        measured=measured,
        free=free,
        experts_on_host=max(given, len(choice.host_experts)),
    )
    if free.devices:
        _log.info(
            "placed on the GPUs" if config.uses_gpus else "nothing of the model is on the GPUs",
            extra={
                "gpu_layers": plan.gpu_layers,
                "of_layers": plan.layers,
                "experts_on_host": plan.experts_on_host,
                "cells": measured.cells,
                "takes": _listed((measured.need or MemoryNeed()).places),
                "free": _listed(free.devices),
            },
        )
    return plan


def checked(plan: LoadPlan) -> LoadPlan:
    """Return ``plan``; raises StartupError if it needs more than is free, unless the flags allow that."""
    if plan.measured.need is None:
        _log.info(
            "this build of llama.cpp does not report the memory that a model needs, so free memory is not checked"
        )
    problem = plan.problem
    if problem is not None:
        if not plan.config.allow_overcommit:
            raise StartupError(problem)
        _log.warning("memory is short: %s", problem)
    return plan


def _choose(config: ShardConfig, free: FreeMemory, measured_with: Callable[[ShardConfig], Measured]) -> Choice:
    """Return what ``config`` leaves open."""
    is_open = config.gpu_layers is None
    if not free.devices:
        return Choice(gpu_layers=0 if is_open else None)
    if not config.fit or config.gpu_layers == 0 or config.split_mode == "tensor":
        # As in llama-server, what is split by tensors is not fitted.
        return Choice(gpu_layers=ALL_LAYERS if is_open else None)
    everything = measured_with(Choice(gpu_layers=ALL_LAYERS if is_open else None).apply(config))
    if everything.need is None:
        return Choice(gpu_layers=ALL_LAYERS if is_open else None)

    def fits(choice: Choice) -> bool:
        need = measured_with(choice.apply(config)).need
        return need is not None and leaves_margins(need, free, config.margins)

    open_choices = choices(config, everything.shape, len(free.devices))
    choice = best(open_choices, fits)
    if choice is None:
        # Even without layers, llama.cpp would compute prompts on devices.
        choice = Choice(gpu_layers=0, leaves_devices=True) if is_open else open_choices[-1]
    return choice


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{place} {in_words(size)}" for place, size in sizes.items())
