"""What router and shard say of their flags is said of options of Python in this package."""

import pytest

from caravan.local_model import LocalModel
from caravan.python_names import in_python


@pytest.mark.parametrize(
    ("said", "ours"),
    [
        (
            "cannot read the model x; pass -m the path of a GGUF file",
            "cannot read the model x; pass model the path of a GGUF file",
        ),
        (
            "they need shards that were started with --embeddings",
            "they need a model that was opened with embeddings=True",
        ),
        (
            "pass -c 2048 or more, a smaller -np, or drop --exact",
            "pass ctx_size=2048 or more, a smaller parallel, or drop exact=True",
        ),
        (
            "pass -b and -ub 400 or more, or --no-mmproj",
            "pass batch_size and ubatch_size=400 or more, or mmproj_auto=False",
        ),
        ("needs flash attention: pass -fa on", "needs flash attention: pass flash_attn='on'"),
        ("batch-size must be >= parallel", "batch_size must be >= parallel"),
        ("see --log-level debug", 'see logging.getLogger("caravan_shard") at level DEBUG'),
        # No option of this package.
        ("pass --health-address or a well-known x-y", "pass --health-address or a well-known x-y"),
    ],
)
def test_flags_are_told_as_options(said: str, ours: str) -> None:
    assert in_python(said) == ours


def test_options_that_contradict_each_other_are_named_as_given() -> None:
    with pytest.raises(ValueError, match="batch_size must be >= parallel"):
        LocalModel("x", {"backend": "fake", "batch_size": 2, "parallel": 8})
