"""A small model for each family of memory that llama.cpp has."""

from collections.abc import Callable
from pathlib import Path

from caravan_testing import shard_models as models


def _of(path: Path) -> Callable[[], Path]:
    return lambda: models.fetched(path)


FAMILIES: dict[str, Callable[[], Path]] = {
    "plain": _of(models.PLAIN_MODEL),
    "sliding window": _of(models.SMALL_WINDOW_MODEL),
    "M-RoPE": _of(models.POSITIONS_MODEL),
    "recurrent": _of(models.RECURRENT_MODEL),
    "granitehybrid": _of(models.HYBRID_MODEL),
    "qwen3next": _of(models.DELTA_MODEL),
    "qwen35": _of(models.DELTA_POSITIONS_MODEL),
    "lfm2": _of(models.CONVOLUTION_MODEL),
}
