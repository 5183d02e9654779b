"""What a shard says that it will take is what it takes."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import llama_cpp
import pytest

from caravan_models.cli import show_model
from caravan_shard.backends.llama.devices import plan as planning
from caravan_shard.backends.llama.devices.devices import first_devices
from caravan_shard.backends.llama.devices.measure import measure, memory_breakdown
from caravan_shard.backends.llama.devices.plan import LoadPlan, checked, plan_load
from caravan_shard.cli import main
from caravan_shard.config import ShardConfig
from caravan_shard.memory_need import HOST, FreeMemory
from caravan_shard.model_flags import USUAL_CELLS
from caravan_shard.service.memory_report import memory_report
from caravan_shard.startup_error import StartupError
from caravan_testing.seen_drafts import counts
from caravan_testing.shard_builders import first_chunk, with_parameters
from caravan_testing.shard_models import (
    DEMO_MODEL,
    DFLASH_HEAD,
    DFLASH_MODEL,
    DSPARK_HEAD,
    EAGLE3_HEAD,
    EAGLE3_MODEL,
    HEAD_MODEL,
    VOCABULARY_SIZE,
    ModelDriver,
    fetched,
)
from caravan_testing.shard_tiny_bert import TinyBert
from caravan_testing.shard_tiny_llama import CONTEXT, Shape, write_tiny_llama

pytestmark = pytest.mark.model

MIB = 1 << 20
# Layers, KV heads and their size of the demo model, and 2 bytes for each key and value.
DEMO_CELL = 30 * 3 * 64 * 2 * 2


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(autouse=True)
def same_log() -> Iterator[None]:
    """The command sets up logging for its process."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


def plan(path: Path, **flags: Any) -> LoadPlan:
    return plan_load(ShardConfig(model=str(path), threads=1, **flags), first_devices())


def parts(path: Path, **flags: Any) -> dict[str, int]:
    need = plan(path, device="none", **flags).measured.need
    assert need is not None
    return need.by_place[HOST]


def test_cells_and_weights_are_counted_to_the_byte() -> None:
    model = fetched(DEMO_MODEL)
    found = parts(model, ctx_size=4096, parallel=4)
    assert found["cells"] == 4096 * DEMO_CELL
    assert 0 < found["mapped_weights"] < model.stat().st_size
    assert parts(model, ctx_size=4096, parallel=4, kv_layout="unified")["cells"] == 4096 * DEMO_CELL
    # 34 bytes for 32 numbers.
    quantized = parts(model, ctx_size=4096, parallel=4, cache_type_k="q8_0", cache_type_v="q8_0", flash_attn="on")
    assert quantized["cells"] == 4096 * DEMO_CELL * 34 // 64
    in_memory = parts(model, ctx_size=4096, parallel=4, mmap=False)
    assert "mapped_weights" not in in_memory
    assert in_memory["weights"] == found["mapped_weights"] + found.get("weights", 0)
    embedding = parts(model, ctx_size=4096, parallel=4, embeddings=True)
    assert embedding["embeddings"] > 0
    assert {**embedding, "embeddings": 0, "logits": 0} == {**found, "embeddings": 0, "logits": 0}


def test_a_load_without_memory_plans_what_a_real_load_takes(tiny: Path) -> None:
    """The whole breakdown of llama.cpp, of a model with and without its memory."""
    llama_cpp.llama_backend_init()
    found = []
    for no_alloc in (True, False):
        parameters = llama_cpp.llama_model_default_params()
        parameters.no_alloc = no_alloc
        parameters.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        model = llama_cpp.llama_model_load_from_file(str(tiny).encode(), parameters)
        context_parameters = llama_cpp.llama_context_default_params()
        context_parameters.n_ctx = 512
        context = llama_cpp.llama_init_from_model(model, context_parameters)
        uses = memory_breakdown(context)
        assert uses is not None
        assert sum(use.model for use in uses) == llama_cpp.llama_model_size(model)
        found.append(sorted((use.place, use.model, use.context, use.compute) for use in uses))
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)
    assert found[0] == found[1]
    assert {place for place, *_ in found[0]} == {HOST}


def test_the_estimate_is_of_a_head_too() -> None:
    flags = {"ctx_size": 512, "parallel": 1, "batch_size": 64}
    alone = parts(fetched(HEAD_MODEL), **flags)
    both = parts(fetched(HEAD_MODEL), **flags, spec_type="auto")
    # One layer beside three, 64 floats for each of 512 cells and of 64 tokens of a draft, and those of two batches.
    assert both["draft_cells"] == alone["cells"] // 3
    assert both["draft_states"] == 4 * 64 * (512 + 64 + 2 * 64)
    assert both["draft_logits"] == 4 * VOCABULARY_SIZE
    assert both["mapped_weights"] > alone["mapped_weights"]


def test_the_estimate_is_of_an_eagle3_head_too() -> None:
    flags = {"ctx_size": 512, "parallel": 1, "batch_size": 64}
    alone = parts(fetched(EAGLE3_MODEL), **flags)
    head = fetched(EAGLE3_HEAD)
    both = parts(fetched(EAGLE3_MODEL), **flags, spec_type="auto", model_draft=str(head))
    # One layer beside four.
    assert both["draft_cells"] == alone["cells"] // 4
    # Three layers of 64 floats for each of 512 cells and of 64 tokens of a draft, and of a batch, whose states follow.
    assert both["draft_states"] == 4 * 64 * (3 * (512 + 64 + 64) + 64)
    # llama.cpp makes room for those of all tokens.
    assert both["draft_logits"] == 4 * VOCABULARY_SIZE * 64
    weights = 10 * 64 * 64 + 4 * 64 + 3 * 64 * 128
    assert both["draft_mapped_weights"] == 4 * weights
    assert {name: size for name, size in both.items() if not name.startswith("draft_")} == alone


def test_the_estimate_is_of_a_head_that_drafts_blocks_too() -> None:
    flags = {"ctx_size": 512, "parallel": 1, "batch_size": 64}
    alone = parts(fetched(DFLASH_MODEL), **flags)
    both = parts(fetched(DFLASH_MODEL), **flags, spec_type="auto", model_draft=str(fetched(DFLASH_HEAD)))
    # Two layers beside four, whose keys and values have 64 numbers, as in the model.
    assert both["draft_cells"] == alone["cells"] // 2
    # Three layers of 64 floats for each of 512 cells and of 64 tokens of a draft, and of a batch.
    assert both["draft_states"] == 4 * 64 * 3 * (512 + 64 + 64)
    assert both["draft_logits"] == 4 * VOCABULARY_SIZE * 64
    assert both["draft_mapped_weights"] > 0
    assert {name: size for name, size in both.items() if not name.startswith("draft_")} == alone


@pytest.mark.parametrize("head", [DFLASH_HEAD, DSPARK_HEAD], ids=["dflash", "dspark"])
def test_no_block_takes_more_than_estimated(head: Path) -> None:
    flags = {"ctx_size": 1024, "parallel": 4, "spec_type": "auto", "model_draft": str(fetched(head))}
    driver = ModelDriver(fetched(DFLASH_MODEL), **flags, device="none")
    for number in range(4):
        chunk = first_chunk(number, driver.tokens(f"prompt {number}"), max_new=16, ignore_eos=True)
        driver.prefill(with_parameters(chunk, max_draft_tokens=4))
    assert counts(driver.decode(list(range(4)), max_draft_tokens=16))[1] > 30
    uses = memory_breakdown(driver.backend.draft_model._context)
    assert uses is not None
    estimated = parts(fetched(DFLASH_MODEL), **flags, flash_attn="on")["draft_compute_buffers"]
    assert sum(use.compute for use in uses) <= estimated
    driver.engine.close()


def test_the_estimate_is_of_a_draft_model_too(tiny: Path) -> None:
    alone = parts(tiny, ctx_size=512, parallel=1)
    both = parts(tiny, ctx_size=512, parallel=1, model_draft=str(tiny))
    assert both["draft_cells"] == alone["cells"]
    assert both["draft_mapped_weights"] == alone["mapped_weights"]
    assert {name: size for name, size in both.items() if not name.startswith("draft_")} == alone


def test_a_model_that_only_embeds_has_no_cells(tmp_path: Path) -> None:
    bert = TinyBert().write(tmp_path / "bert.gguf")
    found = plan(bert)
    assert found.measured.cells == 0
    assert found.measured.need is not None
    assert "cells" not in found.measured.need.by_place[HOST]
    assert found.problem is None


_RUN = """
import json, sys
import numpy as np
from pathlib import Path
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.config import ShardConfig
from caravan_proto.host_memory import own_memory
from caravan_shard.service.loading import backend_loader

backend = backend_loader(ShardConfig(**json.loads(sys.argv[1])))()
# The largest step there is: it writes to all buffers. Cells were cleared.
count = min(backend.capacity.max_batch_tokens, backend.capacity.current.cells_per_sequence)
outputs = np.zeros(count, np.int8)
outputs[-1] = 1
batch = TokenBatch(np.full(count, 5, np.int32), np.arange(count, dtype=np.int32), np.zeros(count, np.int32), outputs)
assert backend.decode(batch) is DecodeOutcome.OK
maps = [line.split() for line in Path("/proc/self/smaps").read_text().splitlines()]
mapped, name = 0, ""
for fields in maps:
    if not fields[0].endswith(":"):
        name = fields[-1]
    elif fields[0] == "Rss:" and name.endswith(".gguf"):
        mapped += int(fields[1]) << 10
print(json.dumps({"anonymous": own_memory(), "mapped": mapped}))
backend.close()
"""


@pytest.mark.parametrize(
    "flags",
    [
        {"ctx_size": 8192, "parallel": 8, "batch_size": 128},
        {
            "ctx_size": 16_384,
            "parallel": 2,
            "batch_size": 64,
            "kv_layout": "unified",
            "mmap": False,
            "cache_type_k": "q8_0",
            "cache_type_v": "q8_0",
        },
    ],
    ids=["split", "unified, quantized and in memory"],
)
def test_a_shard_takes_what_was_estimated(flags: dict[str, Any]) -> None:
    """Pages that it has written to after steps of full size; see docs/operations.md for the figures."""
    config = {"model": str(fetched(DEMO_MODEL)), "threads": 2, "gpu_layers": 0, **flags}
    report = memory_report(ShardConfig(**config))
    assert report.need is not None
    own = report.need.by_place[HOST]
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps(config)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    mapped = own.pop("mapped_weights", 0)
    assert abs(taken["mapped"] - mapped) <= mapped // 20 + MIB
    expected = sum(own.values())
    assert 0.5 * expected < taken["anonymous"] < 1.05 * expected, (taken, own)


def test_the_command_prints_json_for_programs(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--estimate", "-m", str(tiny), "-c", "1024", "-np", "2", "--device", "none", "-cram", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["host_bytes"] == sum(found["parts"]["host"].values())
    assert found["devices"] == {}
    assert found["parts"]["host"]["cells"] == 1024 * 2 * 64 * 2 * 2
    assert found["fits"] is True
    assert found["problem"] is None
    assert found["free"]["host_bytes"] > 0
    assert found["saved_prefixes_bytes"] == MIB
    assert found["chosen"] == {"gpu_layers": 0, "of_layers": 3, "experts_on_host": 0, "cells": 1024, "parallel": 2}
    assert main(["--backend", "fake", "--estimate"]) == 0
    assert json.loads(capsys.readouterr().out)["host_bytes"] == 0


def test_the_report_is_for_people(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", str(tiny), "--fit-report", "--device", "none"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "tiny.gguf\n0 of 3 layers on GPUs\n8192 KV cells for up to 8 sequences\ncontext 8,192 cells ("
    )
    assert "\n  left " in text


LONG_CONTEXT = 65_536


@pytest.mark.parametrize(
    ("flags", "cells", "why"),
    [
        ((), LONG_CONTEXT, "trained for 65,536; 32 MiB of KV on host, "),
        (("--fit-host", "1"), 4096, "as many of the trained 65,536 as fit; 2 MiB of KV on host, "),
        (("--fit", "off"), 8192, "--fit off; "),
        (("-c", "512", "-np", "2"), 512, "as -c says; "),
        (("-c", "0"), LONG_CONTEXT, "trained for 65,536; "),
    ],
    ids=["fits", "the least", "not fitted", "given", "given as trained"],
)
def test_the_context_is_what_the_model_was_trained_for_if_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], cells: int, why: str
) -> None:
    model = write_tiny_llama(tmp_path / "long.gguf", Shape(context=LONG_CONTEXT))
    assert main(["-m", str(model), "--fit-report", "--device", "none", "-ub", "64", *flags]) == 0
    assert f"\ncontext {cells:,} cells ({why}" in capsys.readouterr().out


def test_cells_take_half_of_the_memory_that_the_rest_leaves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_llama(tmp_path / "long.gguf", Shape(context=LONG_CONTEXT))
    room = 100 * MIB
    flags = ("--device", "none", "-ub", "64", "--fit-host", str(room // MIB))
    assert main(["-m", str(model), "--estimate", *flags]) == 0
    told = json.loads(capsys.readouterr().out)
    parts = told["parts"]["host"]
    cells = parts.pop("cells") + parts.pop("cell_tables")
    assert 4096 < told["chosen"]["cells"] < LONG_CONTEXT
    # The next larger number would take an eighth more.
    assert cells <= (room - sum(parts.values())) / 2 < cells * 1.2


def test_show_says_where_a_shard_would_put_a_model(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show_model([str(tiny), "--fit", "-c", "1024", "--device", "none"]) == 0
    facts, report = capsys.readouterr().out.split("\n\n", maxsplit=1)
    assert "architecture  llama" in facts
    assert report.startswith("tiny.gguf\n0 of 3 layers on GPUs\n1024 KV cells")
    assert show_model([str(tiny), "--fit", "--device", "GPU7"]) != 0
    assert "device 'GPU7' is not there" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        show_model([str(tiny), "-c", "1024"])


def test_a_file_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-m", "missing.gguf", "--estimate"]) == 2
    assert "cannot read the model missing.gguf" in capsys.readouterr().err


def test_a_model_that_cannot_fit_is_refused_unless_a_flag_allows_it(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # 2 GiB: 1,024 bytes for each cell.
    flags = ["-m", str(tiny), "-c", str(2**21), "-np", "1", "-ctk", "f32", "-ctv", "f32", "--device", "none"]
    monkeypatch.setattr(planning, "available_memory", lambda: 1 << 30)
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert "tiny.gguf needs " in error
    assert "and 1.0 GiB are free: pass a smaller -c" in error
    assert main([*flags, "--estimate"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["problem"] in error


def test_a_shortage_that_is_allowed_is_a_warning(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planning, "available_memory", lambda: 1 << 30)
    cells = {"ctx_size": 2**21, "cache_type_k": "f32", "cache_type_v": "f32", "parallel": 1}
    allowed = plan(tiny, device="none", allow_overcommit=True, **cells)
    assert allowed.problem is not None
    assert checked(allowed) is allowed
    assert "memory is short" in caplog.text
    with pytest.raises(StartupError, match="needs"):
        checked(plan(tiny, device="none", **cells))


def test_more_cells_than_could_be_looked_at_are_refused_at_once(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caravan_shard.backends.llama.devices.measure.available_memory", lambda: 1 << 30)
    with pytest.raises(StartupError, match=r"need 128\.0 GiB for their tables alone, and 1\.0 GiB .* a smaller -c"):
        plan(tiny, device="none", ctx_size=2**30, parallel=1)


def test_a_build_that_does_not_tell_is_trusted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caravan_shard.backends.llama.devices.measure._FUNCTION", "no_such_function")
    unknown = plan(tiny, device="none")
    assert unknown.measured.need is None
    assert unknown.problem is None
    assert checked(unknown) is unknown
    report = memory_report(ShardConfig(model=str(tiny)))
    assert report.as_json()["host_bytes"] is None
    assert "does not report" in report.as_text()


def test_without_gpus_only_the_context_is_chosen(tiny: Path) -> None:
    found = plan(tiny, device="none")
    assert found.config.gpu_layers == 0
    assert found.config.ctx_size == USUAL_CELLS
    assert found.gpu_layers == 0
    assert found.free == FreeMemory(host=found.free.host)
    assert measure(found.config, []).shape.trained_context == CONTEXT


def test_other_models_of_the_process_do_not_hide_a_shortage(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process has is taken off the need, but no more than its program takes."""
    found = plan(tiny, device="none")
    need = cast("Any", found.measured.need).places[HOST]
    monkeypatch.setattr(planning, "own_memory", lambda: 1 << 40)
    monkeypatch.setattr(planning, "available_memory", lambda: need - (60 << 20))
    assert plan(tiny, device="none").problem is not None
    monkeypatch.setattr(planning, "available_memory", lambda: need - (40 << 20))
    assert plan(tiny, device="none").problem is None
