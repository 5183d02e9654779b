"""What a shard needs is added up by place, and what does not fit is said in one line."""

from caravan_shard.memory_need import HOST, FreeMemory, MemoryNeed, Part, in_words, shortage

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
