"""Flags for where weights lie and how positions are encoded: what they mean, and what is refused."""

from typing import Any

import llama_cpp
import pytest

from caravan_proto.flags import load
from caravan_shard.backends.llama.memory.context import set_rope
from caravan_shard.config import ShardConfig
from caravan_shard.placement_flags import EXPERTS, TensorOverride


def config(**flags: Any) -> ShardConfig:
    return ShardConfig(model="m.gguf", **flags)


def parsed(*argv: str) -> ShardConfig:
    return load(ShardConfig, prog="caravan-shard", description="", argv=["-m", "m.gguf", *argv])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"override_tensor": ("ffn_up",)}, "override-tensor must be PATTERN=BUFFER. Given: 'ffn_up'"),
        ({"override_tensor": ("=CPU",)}, "must be PATTERN=BUFFER"),
        ({"override_tensor": ("a=CPU,b",)}, "Given: 'b'"),
        ({"override_tensor": ("(=CPU",)}, "no regular expression before the ="),
        ({"cpu_moe": True, "n_cpu_moe": 3}, "cpu-moe is for all layers"),
        ({"fit_target": "1024,x"}, "fit-target must be whole numbers"),
        ({"fit_target": ""}, "fit-target must be whole numbers"),
        ({"fit_target": "-1"}, "fit-target must be whole numbers"),
        ({"rope_scaling": "yarn", "yarn_attn_factor": 0.5}, "pass --yarn-ext-factor 0, or drop it. Given: 0.5"),
        ({"rope_scale": 2.0, "rope_freq_scale": 0.5}, "pass one of them. Given: 0.5 and 2.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(").replace(".", r"\.")):
        config(**flags)


def test_names_are_those_of_llama_server() -> None:
    given = parsed(
        *("-ncmoe", "2", "-ot", "a=CPU,b=GPU0", "-ot", "c=CPU", "-fit", "off", "-fitt", "512,256", "-fitc", "1024"),
        *("--no-mmap", "--mlock", "--numa", "isolate", "--rope-scaling", "yarn", "--rope-scale", "4"),
        *("--rope-freq-base", "1e6", "--yarn-orig-ctx", "4096", "--yarn-ext-factor", "0"),
        *("--yarn-attn-factor", "0.9", "--yarn-beta-slow", "2", "--yarn-beta-fast", "16"),
    )
    assert given.tensor_overrides == [
        TensorOverride("a", "CPU"),
        TensorOverride("b", "GPU0"),
        TensorOverride("c", "CPU"),
        TensorOverride(rf"blk\.0{EXPERTS}", "CPU"),
        TensorOverride(rf"blk\.1{EXPERTS}", "CPU"),
    ]
    assert (given.fit, given.margins, given.fit_ctx) == (False, [512 << 20, 256 << 20], 1024)
    assert (given.mmap, given.mlock, given.numa) == (False, True, "isolate")
    assert parsed("-cmoe").tensor_overrides == [TensorOverride(EXPERTS, "CPU")]
    assert parsed("--n-cpu-moe", "1") == parsed("-ncmoe", "1")
    assert parsed("--mmap", "off") == parsed("--no-mmap")
    assert parsed("--no-mmap", "--mmap") == parsed() == parsed("--fit", "--cpu-moe", "off")


def test_positions_are_encoded_as_the_file_says_unless_flags_say_otherwise() -> None:
    defaults = llama_cpp.llama_context_default_params()
    parameters = llama_cpp.llama_context_default_params()
    set_rope(config(), parameters)
    for field in (
        *("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx", "yarn_ext_factor"),
        *("yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast"),
    ):
        assert getattr(parameters, field) == getattr(defaults, field), field
    assert config().rope_changes == ()
    changed = config(
        rope_scaling="yarn",
        rope_scale=4.0,
        rope_freq_base=5e5,
        yarn_orig_ctx=2048,
        yarn_ext_factor=0.0,
        yarn_beta_fast=8.0,
    )
    set_rope(changed, parameters)
    assert parameters.rope_scaling_type == llama_cpp.LLAMA_ROPE_SCALING_TYPE_YARN
    assert (parameters.rope_freq_base, parameters.rope_freq_scale) == (5e5, 0.25)
    assert (parameters.yarn_orig_ctx, parameters.yarn_ext_factor, parameters.yarn_beta_fast) == (2048, 0.0, 8.0)
    assert parameters.yarn_attn_factor == parameters.yarn_beta_slow == -1.0
    assert dict(changed.rope_changes)["freq_scale"] == 0.25


@pytest.mark.parametrize(
    ("flags", "longest"),
    [
        ({}, 8192),
        ({"rope_scale": 4.0}, 32_768),
        ({"rope_freq_scale": 0.5}, 16_384),
        ({"rope_scale": 4.0, "yarn_orig_ctx": 4096}, 16_384),
        ({"rope_scale": 0.5}, 8192),
        # Nothing says how far another base reaches.
        ({"rope_freq_base": 1e6}, 0),
    ],
)
def test_sequences_may_be_as_long_as_the_scale_allows(flags: dict[str, Any], longest: int) -> None:
    assert config(**flags).longest_context(8192) == longest


def test_a_draft_model_has_its_own_places_and_the_same_positions() -> None:
    whole = config(
        model_draft="d.gguf",
        cpu_moe=True,
        override_tensor=("a=CPU",),
        rope_scale=2.0,
        mmap=False,
        mlock=True,
        gpu_layers=7,
    )
    draft = whole.of_draft_model(1024, None)
    assert draft.tensor_overrides == []
    assert draft.rope_changes == whole.rope_changes
    assert (draft.mmap, draft.mlock, draft.gpu_layers) == (False, True, -1)


def test_cells_are_those_of_the_flags_the_file_or_the_default() -> None:
    assert config().cells_of(4096) == 8192
    assert config(ctx_size=0).cells_of(4096) == 4096
    assert config(ctx_size=512).cells_of(4096) == 512
    with pytest.raises(ValueError, match="Given: 8192"):
        config(parallel=64, kv_layout="split")
