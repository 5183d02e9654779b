"""Chooses how many cells a model has, and what of it lies on devices, so that they have room for it.

llama-server does this with its ``common_fit_params``, which libllama does not export. As there, each choice is measured
by a load without memory. What a choice gives up comes in llama-server's order: cells, experts, layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from caravan_shard.backends.llama.measure import ModelShape
from caravan_shard.config import ShardConfig
from caravan_shard.memory_need import HOST, FreeMemory, MemoryNeed
from caravan_shard.placement_flags import EXPERTS, HOST_BUFFERS

ALL_LAYERS = -1
_BLOCK = 256
# Multiples of it spread evenly over any range, whatever their number.
_GOLDEN_RATIO = 0.6180339887498949

T = TypeVar("T")


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
        if self.leaves_devices:
            return replace(config, gpu_layers=0, device="none", rpc="")
        if self.gpu_layers is not None:
            config = replace(config, gpu_layers=self.gpu_layers)
        if self.cells is not None:
            config = replace(config, ctx_size=self.cells)
        if sorted(self.host_experts) == list(range(count)):
            return replace(config, n_cpu_moe=count) if count else config
        layers = "|".join(map(str, sorted(self.host_experts)))
        return replace(config, override_tensor=(rf"blk\.({layers}){EXPERTS}={HOST_BUFFERS}",))


def choices(config: ShardConfig, shape: ModelShape, device_count: int) -> list[Choice]:
    """Return what ``config`` leaves open to choose, beginning with everything on devices, each taking less there."""
    found: list[Choice] = []
    layers = None if config.gpu_layers is not None else ALL_LAYERS
    cells = _cell_numbers(config, shape.trained_context)
    found += [Choice(gpu_layers=layers, cells=number) for number in cells]
    least = cells[-1]
    given = config.cpu_moe or config.n_cpu_moe or config.override_tensor
    experts: tuple[int, ...] = ()
    if shape.has_experts and not given and layers is not None:
        order = expert_order(shape.layers, device_count)
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


def _cell_numbers(config: ShardConfig, trained_context: int) -> list[int | None]:
    """Return the numbers of cells to choose from, the largest first; [None] if the flags name one."""
    if config.ctx_size is not None:
        return [None]
    # Each sequence wants a block in the layout that all start with.
    least = max(config.fit_ctx, _BLOCK * config.parallel)
    most = max(config.longest_context(trained_context) or trained_context, least)
    found = [most]
    while found[-1] > least:
        found.append(max(least, found[-1] * 7 // 8 // _BLOCK * _BLOCK))
    return list(found)


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
