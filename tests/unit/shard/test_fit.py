"""What a shard needs is added up by place; what is chosen fits, and nothing is given up without need."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from caravan_shard.backends.llama.devices.measure import ModelShape
from caravan_shard.backends.llama.devices.plan import ALL_LAYERS, Choice, best, choices, expert_order, leaves_margins
from caravan_shard.config import ShardConfig
from caravan_shard.memory_need import HOST, FreeMemory, MemoryNeed, Part, in_words, shortage

CONFIG = ShardConfig(model="m.gguf")
MIB = 1 << 20

GIB = 1 << 30
NEED = MemoryNeed(
    (
        Part(HOST, "mapped_weights", 3 * GIB),
        Part("GPU0", "weights", 6 * GIB),
        Part("GPU0", "cells", 2 * GIB),
        Part(HOST, "cells", 0),
        Part(HOST, "mapped_weights", GIB),
    )
)


@dataclass(frozen=True)
class Model:
    """A model whose layers are alike. Sizes in bytes; ``compute``: of each device that is used."""

    layers: int
    dense: int
    experts: int
    cell: int
    output: int
    compute: int
    trained_context: int = 32_768

    @property
    def shape(self) -> ModelShape:
        return ModelShape(layers=self.layers, has_experts=self.experts > 0, trained_context=self.trained_context)

    def need(self, choice: Choice, devices: list[str]) -> MemoryNeed:
        """Share the layers out like llama.cpp: the last ones to devices, in equal parts, the output to the last."""
        count = self.layers + 1 if choice.gpu_layers == ALL_LAYERS else choice.gpu_layers or 0
        cells = 8192 if choice.cells is None else choice.cells
        parts = [Part(device, "compute_buffers", self.compute) for device in devices if not choice.leaves_devices]
        first = self.layers + 1 - count
        for layer in range(self.layers + 1):
            place = HOST if layer < first else devices[(layer - first) * len(devices) // count]
            if layer == self.layers:
                parts.append(Part(place, "weights", self.output))
                continue
            parts += [Part(place, "weights", self.dense), Part(place, "cells", self.cell * cells)]
            parts.append(Part(HOST if layer in choice.host_experts else place, "weights", self.experts))
        return MemoryNeed(tuple(parts))


models = st.builds(
    Model,
    layers=st.integers(1, 20),
    dense=st.integers(1, 400 * MIB),
    experts=st.one_of(st.just(0), st.integers(1, 2000 * MIB)),
    cell=st.integers(1, 8192),
    output=st.integers(1, 1000 * MIB),
    compute=st.integers(1, 500 * MIB),
)
frees = st.lists(st.integers(0, 96 << 30), min_size=1, max_size=4)
margins = st.integers(0, 4 << 30)


def chosen(model: Model, free: FreeMemory, margin: int) -> Choice | None:
    devices = list(free.devices)
    return best(
        choices(CONFIG, model.shape, free),
        lambda choice: leaves_margins(model.need(choice, devices), free, [margin]),
    )


def memory(sizes: list[int]) -> FreeMemory:
    return FreeMemory(host=None, devices={f"GPU{number}": size for number, size in enumerate(sizes)})


@given(models, frees, margins)
def test_what_is_chosen_leaves_the_margin_of_every_device(model: Model, sizes: list[int], margin: int) -> None:
    free = memory(sizes)
    choice = chosen(model, free, margin)
    if choice is not None:
        places = model.need(choice, list(free.devices)).places
        assert all(places[name] <= size - margin for name, size in free.devices.items())


@given(models, frees, margins)
def test_all_of_it_lies_on_devices_if_that_fits(model: Model, sizes: list[int], margin: int) -> None:
    free = memory(sizes)
    first = choices(CONFIG, model.shape, free)[0]
    assert (first.gpu_layers, first.host_experts, first.cells) == (ALL_LAYERS, (), model.trained_context)
    fits = leaves_margins(model.need(first, list(free.devices)), free, [margin])
    assert (chosen(model, free, margin) == first) == fits


@given(models, st.integers(0, 96 << 30), st.integers(0, 32 << 30), margins)
def test_more_free_memory_never_gives_less(model: Model, size: int, more: int, margin: int) -> None:
    order = choices(CONFIG, model.shape, memory([size]))
    with_less, with_more = (chosen(model, memory([free]), margin) for free in (size, size + more))
    if with_less is not None:
        assert with_more is not None
        assert order.index(with_more) <= order.index(with_less)


@given(models, st.integers(1, 4))
def test_each_choice_takes_less_of_the_devices_than_the_one_before(model: Model, count: int) -> None:
    devices = [f"GPU{number}" for number in range(count)]
    taken = []
    for choice in choices(CONFIG, model.shape, memory([0] * count)):
        places = model.need(choice, devices).places
        taken.append(sum(size for place, size in places.items() if place != HOST))
    assert taken == sorted(taken, reverse=True)
    assert len(set(taken)) == len(taken)


@given(st.integers(1, 200), st.integers(1, 8))
def test_experts_leave_several_devices_evenly(layers: int, count: int) -> None:
    order = expert_order(layers, count)
    assert sorted(order) == list(range(layers))
    if count == 1:
        assert order == tuple(range(layers))
        return
    half = order[: layers // 2]
    for device in range(count):
        own = range(device * layers // count, (device + 1) * layers // count)
        assert abs(len(own) / 2 - sum(layer in own for layer in half)) <= 2


def test_only_what_no_flag_names_is_chosen() -> None:
    shape = ModelShape(layers=4, has_experts=True, trained_context=8192)

    def open_to(**flags: object) -> tuple[set[int | None], set[int], set[int | None]]:
        found = choices(ShardConfig(model="m.gguf", **flags), shape, memory([0]))  # type: ignore[arg-type]
        return (
            {choice.gpu_layers for choice in found},
            {len(choice.host_experts) for choice in found},
            {choice.cells for choice in found},
        )

    assert open_to() == ({-1, 4, 3, 2, 1}, {0, 1, 2, 3, 4}, {8192, 7168, 6144, 5376, 4608, 4096})
    assert open_to(ctx_size=2048) == ({-1, 4, 3, 2, 1}, {0, 1, 2, 3, 4}, {None})
    assert open_to(ctx_size=2048, gpu_layers=3) == ({None}, {0}, {None})
    assert open_to(ctx_size=2048, n_cpu_moe=1) == ({-1, 4, 3, 2, 1}, {0}, {None})
    assert open_to(ctx_size=2048, cpu_moe=True)[1] == {0}
    assert open_to(ctx_size=2048, override_tensor=("x=CPU",))[1] == {0}
    assert open_to(gpu_layers=3, fit_ctx=8192)[2] == {8192}
    # Each sequence has at least a block of cells.
    assert min(number or 0 for number in open_to(parallel=32)[2]) == 8192


def test_a_choice_becomes_flags() -> None:
    one = Choice(gpu_layers=3, host_experts=(0, 1), cells=512).apply(CONFIG)
    assert (one.gpu_layers, one.n_cpu_moe, one.ctx_size) == (3, 2, 512)
    spread = Choice(gpu_layers=ALL_LAYERS, host_experts=(5, 1)).apply(CONFIG)
    assert spread.n_cpu_moe == 0
    (override,) = spread.tensor_overrides
    assert override.pattern == r"blk\.(1|5)\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    assert override.buffer_type == "CPU"
    host = Choice(gpu_layers=0, leaves_devices=True).apply(ShardConfig(model="m.gguf", rpc="a:1"))
    assert (host.gpu_layers, host.device, host.rpc) == (0, "none", "")
    assert (Choice(gpu_layers=0, cells=512, leaves_devices=True).apply(CONFIG)).ctx_size == 512
    assert Choice(gpu_layers=None).apply(CONFIG) == CONFIG


def test_devices_have_margins_of_their_own() -> None:
    free = memory([10, 20])
    need = MemoryNeed((Part("GPU0", "weights", 7), Part("GPU1", "weights", 9), Part(HOST, "weights", 99)))
    assert leaves_margins(need, free, [3])
    assert not leaves_margins(need, free, [4])
    assert leaves_margins(need, free, [3, 11])
    assert not leaves_margins(need, free, [3, 12])


def test_without_candidates_nothing_is_chosen() -> None:
    assert best([], lambda _: True) is None
    assert best([1, 2, 3], lambda _: False) is None
    assert best([1, 2, 3], lambda number: number >= 3) == 3


def test_parts_are_added_up_by_place_and_kind() -> None:
    assert NEED.places == {HOST: 4 * GIB, "GPU0": 8 * GIB}
    assert NEED.by_place == {HOST: {"mapped_weights": 4 * GIB}, "GPU0": {"weights": 6 * GIB, "cells": 2 * GIB}}
    assert (NEED + MemoryNeed((Part(HOST, "cells", 5),))).places[HOST] == 4 * GIB + 5
    assert MemoryNeed().places == {HOST: 0}


def test_what_fits_has_no_shortage() -> None:
    assert shortage("m", NEED, FreeMemory(host=4 * GIB, devices={"GPU0": 8 * GIB})) is None
    # Nobody knows what is free there.
    assert shortage("m", NEED, FreeMemory(host=None)) is None
    # The process has a part of it already.
    assert shortage("m", NEED, FreeMemory(host=3 * GIB), taken=GIB) is None


def test_a_shortage_names_the_place_the_parts_what_is_free_and_what_to_pass() -> None:
    line = shortage("m.gguf", NEED, FreeMemory(host=GIB, devices={"GPU0": 9 * GIB}))
    assert line is not None
    assert "\n" not in line
    assert "m.gguf needs 4.0 GiB of the host's memory (mapped weights 4.0 GiB), and 1.0 GiB are free" in line
    assert "a file of fewer bits per weight" in line
    assert "--allow-overcommit" in line
    line = shortage("m.gguf", NEED, FreeMemory(host=None, devices={"GPU0": 7 * GIB}))
    assert line is not None
    assert "m.gguf needs 8.0 GiB of GPU0's memory (weights 6.0 GiB, cells 2.0 GiB), and 7.0 GiB are free" in line
    assert "-ngl" in line
    cells = MemoryNeed((*NEED.parts, Part(HOST, "cells", 9 * GIB)))
    line = shortage("m.gguf", cells, FreeMemory(host=GIB))
    assert line is not None
    assert "pass a smaller -c, or -ctk q8_0 -ctv q8_0, or --allow-overcommit" in line


def test_sizes_are_in_the_unit_that_people_read() -> None:
    assert [in_words(size) for size in (0, 1, 5 << 20, GIB, 3 * GIB // 2)] == [
        "0 MiB",
        "1 MiB",
        "5 MiB",
        "1.0 GiB",
        "1.5 GiB",
    ]
