"""Plans a load: fills in what the flags leave open, and compares what it takes with what is free.

How many cells a model has and what of it lies on devices is chosen so that they have room for it. llama-server does
this with its ``common_fit_params``, which libllama does not export. As there, each choice is measured by a load without
memory. What a choice gives up comes in llama-server's order: cells, experts, layers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from caravan_proto.host_memory import available_memory, own_memory
from caravan_shard.backends.llama.devices.cells import cell_numbers, context_line, leaves_host
from caravan_shard.backends.llama.devices.devices import Device
from caravan_shard.backends.llama.devices.measure import Measured, ModelShape, measure
from caravan_shard.config import ShardConfig
from caravan_shard.memory_need import HOST, FreeMemory, MemoryNeed, in_words, shortage
from caravan_shard.model_flags import USUAL_CELLS
from caravan_shard.placement_flags import EXPERTS, HOST_BUFFERS
from caravan_shard.startup_error import StartupError

ALL_LAYERS = -1
# Multiples of it spread evenly over any range, whatever their number.
_GOLDEN_RATIO = 0.6180339887498949

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """``gpu_layers``: with the output layer, or `ALL_LAYERS`. ``host_experts``: layers whose experts stay on the host.

    ``leaves_devices``: nothing is computed there either. ``gpu_layers``, ``cells``: None as the flags say.
    """

    gpu_layers: int | None
    host_experts: tuple[int, ...] = ()
    cells: int | None = None
    leaves_devices: bool = False

    def apply(self, config: ShardConfig) -> ShardConfig:
        """Return ``config`` with this choice."""
        count = len(self.host_experts)
        if self.cells is not None:
            config = replace(config, ctx_size=self.cells)
        if self.leaves_devices:
            return replace(config, gpu_layers=0, device="none", rpc="")
        if self.gpu_layers is not None:
            config = replace(config, gpu_layers=self.gpu_layers)
        if sorted(self.host_experts) == list(range(count)):
            return replace(config, n_cpu_moe=count) if count else config
        layers = "|".join(map(str, sorted(self.host_experts)))
        return replace(config, override_tensor=(rf"blk\.({layers}){EXPERTS}={HOST_BUFFERS}",))


def choices(config: ShardConfig, shape: ModelShape, free: FreeMemory) -> list[Choice]:
    """Return what ``config`` leaves open to choose, beginning with everything on devices, each taking less there."""
    found: list[Choice] = []
    layers = None if config.gpu_layers is not None else ALL_LAYERS
    cells = cell_numbers(config, shape.trained_context, free)
    found += [Choice(gpu_layers=layers, cells=number) for number in cells]
    least = cells[-1]
    given = config.cpu_moe or config.n_cpu_moe or config.override_tensor
    experts: tuple[int, ...] = ()
    if shape.has_experts and not given and layers is not None:
        order = expert_order(shape.layers, len(free.devices))
        found += [
            Choice(gpu_layers=layers, host_experts=order[:count], cells=least) for count in range(1, shape.layers + 1)
        ]
        experts = order
    if layers is not None:
        found += [Choice(gpu_layers=number, host_experts=experts, cells=least) for number in range(shape.layers, 0, -1)]
    return found


def expert_order(layers: int, device_count: int) -> tuple[int, ...]:
    """Return in which order layers leave their experts on the host: the first ones, or evenly from all devices."""
    if device_count == 1:
        return tuple(range(layers))
    return tuple(sorted(range(layers), key=lambda layer: layer * _GOLDEN_RATIO % 1))


def best(candidates: Sequence[T], fits: Callable[[T], bool]) -> T | None:
    """Return the first of ``candidates`` that ``fits``; None if none does. If one does, those after it must too.

    Few are asked, the first one always; the one that is returned was.
    """
    if not candidates or fits(candidates[0]):
        return candidates[0] if candidates else None
    # Before `low` nothing fits; `high` does, or is beyond the end.
    low, high = 1, len(candidates)
    while low < high:
        middle = (low + high) // 2
        if fits(candidates[middle]):
            high = middle
        else:
            low = middle + 1
    return candidates[high] if high < len(candidates) else None


def leaves_margins(need: MemoryNeed, free: FreeMemory, margins: Sequence[int]) -> bool:
    """Whether every device keeps its margin free. ``margins``: for all, or for each in the order of ``free``."""
    names = list(free.devices)
    taken = {place: size for place, size in need.places.items() if place != HOST}
    each = dict(zip(names, [*margins, *[margins[-1]] * len(names)], strict=False))
    return all(size + each[place] <= free.devices[place] for place, size in taken.items() if place in each)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """``config`` has no open choices. ``devices``: all that there are. ``free``: of those that it may use.

    ``given``: the flags before anything was chosen. ``experts_on_host``: number of layers whose experts lie there, but
    for what --override-tensor does.
    """

    config: ShardConfig
    given: ShardConfig
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
    def context_line(self) -> str:
        """How large the context is and why, in one line; "" for a model that only embeds."""
        found = self.measured
        trained = self.given.longest_context(found.shape.trained_context) or found.shape.trained_context
        need = MemoryNeed() if found.need is None else found.need
        return context_line(self.given, found.cells, trained, need, self.free) if found.cells else ""

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
    given = config
    choice = _choose(config, free, measured_with)
    config = choice.apply(config)
    measured = measured_with(config)
    layers = measured.shape.layers if measured.shape.has_experts else 0
    on_host = layers if config.cpu_moe else min(layers, config.n_cpu_moe)
    plan = LoadPlan(
        config=config,
        given=given,
        devices=devices,
        measured=measured,
        free=free,
        experts_on_host=max(on_host, len(choice.host_experts)),
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
        choice = Choice(gpu_layers=0 if is_open else None)
    elif not config.fit or config.gpu_layers == 0 or config.split_mode == "tensor":
        # As in llama-server, what is split by tensors is not fitted.
        choice = Choice(gpu_layers=ALL_LAYERS if is_open else None)
    else:
        choice = _fitted(config, free, measured_with)
    if config.ctx_size is None and config.fit and config.split_mode != "tensor":
        return _with_host_room(config, choice, free, measured_with)
    return choice


def _fitted(config: ShardConfig, free: FreeMemory, measured_with: Callable[[ShardConfig], Measured]) -> Choice:
    """Return the choice with which every device keeps its margin."""
    is_open = config.gpu_layers is None
    everything = measured_with(Choice(gpu_layers=ALL_LAYERS if is_open else None).apply(config))
    if everything.need is None:
        return Choice(gpu_layers=ALL_LAYERS if is_open else None)

    def fits(choice: Choice) -> bool:
        need = measured_with(choice.apply(config)).need
        return need is not None and leaves_margins(need, free, config.margins)

    open_choices = choices(config, everything.shape, free)
    choice = best(open_choices, fits)
    if choice is None:
        # Even without layers, llama.cpp would compute prompts on devices.
        choice = Choice(gpu_layers=0, leaves_devices=True) if is_open else open_choices[-1]
    return choice


def _with_host_room(
    config: ShardConfig, choice: Choice, free: FreeMemory, measured_with: Callable[[ShardConfig], Measured]
) -> Choice:
    """Return ``choice`` with as many of its cells as the host has room for, those of a model without devices too."""
    room = free.host if config.fit_host is None else config.fit_host << 20
    if room is None:
        return choice
    usual = measured_with(replace(choice, cells=choice.cells or USUAL_CELLS).apply(config))
    if usual.need is None or not usual.cells:
        return choice
    numbers = cell_numbers(config, usual.shape.trained_context, free)
    if choice.cells is not None:
        numbers = [number for number in numbers if number is not None and number <= choice.cells]

    def fits(number: int | None) -> bool:
        need = measured_with(replace(choice, cells=number).apply(config)).need
        return need is not None and leaves_host(need, room)

    found = best(numbers, fits)
    return replace(choice, cells=numbers[-1] if found is None else found)


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{place} {in_words(size)}" for place, size in sizes.items())
