"""Where weights lie and how positions are encoded, by what llama.cpp does with the flags."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caravan_shard.arrays import Floats
from caravan_shard.backends.base import DecodeOutcome, TokenBatch
from caravan_shard.backends.llama.backend import LlamaCppBackend
from caravan_shard.config import ShardConfig
from caravan_shard.sequences.run_files import RunFiles
from caravan_shard.startup_error import StartupError
from caravan_testing.shard_models import know_contents
from caravan_testing.shard_tiny_llama import CONTEXT, write_tiny_llama
from caravan_testing.shard_tiny_moe import LAYERS, write_tiny_moe

pytestmark = pytest.mark.model

PROMPT = [5, 9, 17, 33, 65, 40, 41, 42, 43, 44, 45, 46]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny.gguf")


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_moe(tmp_path_factory.mktemp("models") / "moe.gguf")


@contextmanager
def opened(model: Path, **flags: Any) -> Iterator[Any]:
    config = ShardConfig(**{"model": str(model), "threads": 1, "parallel": 1, "ctx_size": 512, **flags})
    backend = LlamaCppBackend(config)
    try:
        know_contents(backend)
        yield backend
    finally:
        backend.close()


def logits(backend: Any) -> Floats:
    count = len(PROMPT)
    outputs = np.zeros(count, np.int8)
    outputs[-1] = 1
    rows = np.arange(count, dtype=np.int32)
    assert backend.decode(TokenBatch(np.array(PROMPT, np.int32), rows, np.zeros(count, np.int32), outputs)) is (
        DecodeOutcome.OK
    )
    found: Floats = backend.logits(1)[0].copy()
    return found


@pytest.fixture(scope="module")
def plain(tiny: Path) -> tuple[Floats, str, str]:
    """Logits, and the fingerprints of cells and of numerics, without flags."""
    with opened(tiny) as backend:
        return logits(backend), backend.contents.state_fingerprint, backend.numerics.fingerprint


@pytest.mark.parametrize(
    "flags",
    [
        {"rope_freq_base": 50_000.0},
        {"rope_freq_scale": 0.5},
        {"rope_scale": 4.0},
        {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_orig_ctx": CONTEXT},
        {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_ext_factor": 0.0},
        {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_ext_factor": 0.0, "yarn_attn_factor": 0.5},
        {"rope_scaling": "yarn", "rope_scale": 4.0, "yarn_beta_slow": 3.0, "yarn_beta_fast": 4.0},
    ],
    ids=str,
)
def test_other_positions_are_other_logits_and_other_cells(
    flags: dict[str, Any], tiny: Path, plain: tuple[Floats, str, str], tmp_path: Path
) -> None:
    expected, cells, numerics = plain
    with opened(tiny, **flags) as backend:
        assert not np.allclose(logits(backend), expected, atol=1e-3)
        assert backend.contents.state_fingerprint != cells
        assert backend.numerics.fingerprint != numerics
        # What was saved with other positions is not even looked at.
        with_flags = RunFiles(tmp_path, backend.contents.state_fingerprint)
        without_flags = RunFiles(tmp_path, cells)
        assert with_flags.folder != without_flags.folder


def test_a_scale_of_the_file_itself_changes_nothing(tiny: Path, plain: tuple[Floats, str, str]) -> None:
    """llama.cpp's own defaults, given as flags: the logits are the same, bit by bit."""
    with opened(tiny, rope_freq_base=10_000.0, rope_freq_scale=1.0) as backend:
        np.testing.assert_array_equal(logits(backend), plain[0])


def test_yarn_flags_each_reach_llama_cpp(tiny: Path) -> None:
    found = []
    for flags in (
        {},
        {"yarn_ext_factor": 0.0},
        {"yarn_ext_factor": 0.0, "yarn_attn_factor": 0.5},
        {"yarn_orig_ctx": 64},
        {"yarn_beta_fast": 2.0},
        {"yarn_beta_slow": 9.0},
    ):
        with opened(tiny, rope_scaling="yarn", rope_scale=4.0, **flags) as backend:
            found.append(logits(backend).tobytes())
    assert len(set(found)) == len(found)


def test_a_scale_makes_sequences_longer(tiny: Path) -> None:
    with opened(tiny, ctx_size=2048) as backend:
        assert backend.capacity.current.cells_per_sequence == CONTEXT
    with opened(tiny, ctx_size=2048, rope_scale=2.0) as backend:
        assert backend.capacity.current.cells_per_sequence == 2 * CONTEXT
    with opened(tiny, ctx_size=2048, rope_freq_base=1e6) as backend:
        assert backend.capacity.current.cells_per_sequence == 2048


def test_tensors_lie_in_the_buffer_that_is_named(moe: Path) -> None:
    with opened(moe) as backend:
        expected = logits(backend)
    for flags in ({"cpu_moe": True}, {"n_cpu_moe": LAYERS}, {"override_tensor": (r"ffn_up=CPU,attn_.*=CPU",)}):
        with opened(moe, **flags) as backend:
            np.testing.assert_allclose(logits(backend), expected, atol=1e-4)


def test_a_buffer_that_is_not_there_is_refused_by_its_name(tiny: Path) -> None:
    with (
        pytest.raises(StartupError, match=r"override-tensor: there is no buffer 'CUDA7'\. llama\.cpp has: .*CPU"),
        opened(tiny, override_tensor=("ffn_up=CUDA7",)),
    ):
        pass


# In a process of its own: mappings, locks and nodes are those of a process.
_LOADED = """
import json, resource, sys
from pathlib import Path
from caravan_shard.backends.llama.model.loading import open_model
from caravan_shard.config import ShardConfig
from caravan_proto.host_memory import locked_memory

flags = json.loads(sys.argv[1])
limit = flags.pop("limit", None)
if limit is not None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
loaded = open_model(ShardConfig(**flags))
name = Path(flags["model"]).name
print(json.dumps({"mapped": name in Path("/proc/self/maps").read_text(), "locked": locked_memory()}))
loaded.close()
"""


def loaded(model: Path, **flags: Any) -> tuple[dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-c", _LOADED, json.dumps({"model": str(model), **flags})],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("flags", [{}, {"numa": "distribute"}, {"numa": "isolate"}], ids=str)
def test_a_file_is_mapped_unless_it_should_be_read(flags: dict[str, Any], moe: Path) -> None:
    assert loaded(moe, **flags)[0]["mapped"]
    assert not loaded(moe, mmap=False, **flags)[0]["mapped"]


def test_weights_are_locked_if_the_host_allows_it(moe: Path) -> None:
    assert loaded(moe)[0]["locked"] == 0
    found, log = loaded(moe, mlock=True)
    if "--mlock is not kept" not in log:
        assert found["locked"] >= moe.stat().st_size // 2
    else:
        assert found["locked"] < moe.stat().st_size


def test_weights_that_cannot_be_locked_are_a_warning(moe: Path, caplog: pytest.LogCaptureFixture) -> None:
    from caravan_shard.backends.llama.model import loading as opening

    with caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patch:
        # Also for root, whom no limit stops.
        patch.setattr(opening, "locked_memory", lambda: 0)
        opening.open_model(ShardConfig(model=str(moe), mlock=True)).close()
    assert "--mlock is not kept" in caplog.text
    assert "ulimit -l" in caplog.text
