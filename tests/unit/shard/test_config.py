"""Combinations of flags that are refused, what they mean, and their defaults, such as the quota of control groups."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

from caravan_proto.flags import load
from caravan_proto.messages.limits import KvLayout
from caravan_shard.adapter_file import AdapterFile
from caravan_shard.backends.llama.memory.context import set_rope
from caravan_shard.backends.toy.model import TOY_FACTS
from caravan_shard.config import ShardConfig
from caravan_shard.cores import quota_cpus, usable_cores
from caravan_shard.placement_flags import EXPERTS, TensorOverride

ALL = float(os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("fields", "advice"),
    [
        ({"backend": "llama"}, "--model"),
        ({"address": "unix:"}, "unix socket"),
        ({"address": "unix:/" + "x" * 200}, "107 bytes"),
        ({"address": "somewhere"}, "host:port"),
        ({"kv_layout": "split", "ctx_size": 2000, "parallel": 8}, "-c 2048"),
        ({"batch_size": 4, "parallel": 8}, "batch-size"),
        ({"lora": ("a/x.gguf", "b/x.gguf")}, "NAME=PATH"),
        ({"lora": ("=x.gguf",)}, "NAME=PATH"),
        ({"lora": ("a name=x.gguf",)}, "not blank"),
        ({"lora": ("name=",)}, "NAME=PATH"),
        ({"flash_attn": "off", "cache_type_v": "q8_0"}, "-fa on"),
        ({"address": "10.0.0.1:1"}, "pass --certfile, --keyfile and --ca-certs for TLS, or --allow-plaintext"),
        ({"address": "0.0.0.0:1"}, "not loopback"),
        ({"address": "[::]:1"}, "not loopback"),
        ({"address": "a.host:1"}, "not loopback"),
        ({"certfile": "c.pem"}, "need each other"),
        ({"ca_certs": "a.pem"}, "need each other"),
        ({"keyfile": "k.pem"}, "--keyfile needs both"),
        ({"alias": "two\nlines"}, "printable"),
        ({"alias": " chat"}, "no space"),
        ({"alias": "a" * 201}, "at most 200"),
        ({"alias": "a,"}, "at least one"),
        ({"alias": "a, b"}, "no space"),
        ({"alias": "a,b,a"}, "differ"),
        ({"address": "unix:/s", "certfile": "c.pem", "ca_certs": "a.pem"}, "a Unix socket has no TLS"),
    ],
)
def test_an_impossible_configuration_is_refused_with_advice(fields: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        ShardConfig(**{"backend": "fake", **fields})


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.1.2.3:1", "[::1]:1", "localhost:1", "unix:/s"])
def test_addresses_that_only_this_host_reaches_need_no_certificate(address: str) -> None:
    assert ShardConfig(backend="fake", address=address).tls is None


def test_beyond_loopback_a_shard_needs_certificates_or_a_flag() -> None:
    secured = ShardConfig(backend="fake", address="0.0.0.0:1", certfile="c.pem", ca_certs="a.pem")
    assert secured.tls is not None
    assert ShardConfig(backend="fake", address="0.0.0.0:1", allow_plaintext=True).tls is None


def test_threads_default_to_the_cores_that_may_be_used() -> None:
    config = ShardConfig(backend="fake")
    assert config.decode_threads == config.batch_threads == usable_cores() >= 1
    config = ShardConfig(backend="fake", threads=3)
    assert (config.decode_threads, config.batch_threads) == (3, 3)
    assert ShardConfig(backend="fake", threads=3, threads_batch=5).batch_threads == 5


@pytest.mark.parametrize(
    ("text", "adapter"),
    [
        ("folder/poet.gguf", AdapterFile("poet", Path("folder/poet.gguf"))),
        ("poet", AdapterFile("poet", Path("poet"))),
        ("org/poet=folder/a=b.gguf", AdapterFile("org/poet", Path("folder/a=b.gguf"))),
        ("poet=folder/x.gguf:0.5", AdapterFile("poet", Path("folder/x.gguf"), 0.5)),
        ("x.gguf:-2", AdapterFile("x", Path("x.gguf"), -2.0)),
        ("poet=C:x.gguf", AdapterFile("poet", Path("C:x.gguf"))),
    ],
)
def test_adapters_have_a_name_a_file_and_a_scale(text: str, adapter: AdapterFile) -> None:
    assert ShardConfig(backend="fake", lora=("first.gguf", text)).adapters == [
        AdapterFile("first", Path("first.gguf")),
        adapter,
    ]


def test_the_layout_starts_split_if_every_sequence_gets_a_block_of_cells() -> None:
    both = [KvLayout.SPLIT, KvLayout.UNIFIED]
    assert ShardConfig(backend="fake").layouts(8192) == both
    config = ShardConfig(backend="fake", parallel=4)
    assert config.layouts(1024) == both
    assert config.layouts(1023) == [KvLayout.UNIFIED]
    for layout in KvLayout:
        assert ShardConfig(backend="fake", kv_layout=layout.value).layouts(8192) == [layout]


def test_disk_is_used_only_with_a_folder() -> None:
    assert ShardConfig(backend="fake", cache_dir_space=2).cache_dir_bytes == 0
    assert ShardConfig(backend="fake", cache_dir="x", cache_dir_space=0.5).cache_dir_bytes == 1 << 29


@pytest.mark.parametrize(
    ("alias", "names"),
    [("", ("file", ())), ("chat", ("chat", ())), ("chat,claude-chat,c", ("chat", ("claude-chat", "c")))],
)
def test_a_model_may_have_several_names(alias: str, names: tuple[str, tuple[str, ...]]) -> None:
    named = ShardConfig(backend="fake", alias=alias).named(replace(TOY_FACTS, name="file"))
    assert (named.name, named.aliases) == names


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


def test_some_heads_are_files_of_their_own() -> None:
    with pytest.raises(ValueError, match="drop --model-draft"):
        config(model_draft="d.gguf", spec_type="draft-mtp")
    assert config(model_draft="d.gguf", spec_type="auto").of_draft_model(1024, None).spec_type == "none"
    for spec_type in ("draft-eagle3", "draft-dflash", "draft-dspark"):
        with pytest.raises(ValueError, match=f"spec-type {spec_type} needs the file of the head: pass --model-draft"):
            config(spec_type=spec_type)


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


def write_groups(folder: Path, membership: str, limits: dict[str, str]) -> tuple[Path, Path]:
    """Write the process's group, and quotas of groups by their paths; return what `quota_cpus` takes."""
    own, root = folder / "cgroup", folder / "groups"
    own.write_text(membership)
    for group, limit in limits.items():
        (root / group).mkdir(parents=True, exist_ok=True)
        if limit.startswith("v1 "):
            _, quota, period = limit.split()
            (root / group / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (root / group / "cpu.cfs_period_us").write_text(f"{period}\n")
        else:
            (root / group / "cpu.max").write_text(limit)
    return own, root


@pytest.mark.parametrize(
    ("membership", "limits", "quota"),
    [
        # A container sees its own group as the root.
        ("0::/\n", {"": "50000 100000\n"}, 0.5),
        ("0::/\n", {"": "max 100000\n"}, ALL),
        # A unit of systemd, within a slice that has less.
        (
            "0::/a.slice/b.service\n",
            {"a.slice": "30000 100000\n", "a.slice/b.service": "90000 100000\n"},
            0.3,
        ),
        # The group is not the root, and another container's mount hides its path.
        ("0::/docker/1f\n", {"": "20000 100000\n"}, 0.2),
        # Version 1, whose folder is named by its controllers.
        ("4:cpu,cpuacct:/docker/1f\n3:memory:/\n", {"cpu,cpuacct/docker/1f": "v1 50000 100000"}, 0.5),
        ("4:cpu,cpuacct:/docker/1f\n", {"cpu": "v1 20000 100000"}, 0.2),
        ("1:cpuacct,cpu:/a/b\n0::/\n", {"cpu/a": "v1 30000 50000", "cpu/a/b": "v1 -1 100000"}, 0.6),
        ("2:cpuset:/a\n", {"cpuset/a": "v1 50000 100000"}, ALL),
        # Version 1 beside version 2, which has no controller.
        ("3:cpuset:/\n1:cpu:/\n0::/\n", {}, ALL),
        ("", {}, ALL),
    ],
)
def test_the_smallest_quota_counts(tmp_path: Path, membership: str, limits: dict[str, str], quota: float) -> None:
    assert quota_cpus(*write_groups(tmp_path, membership, limits)) == quota


def test_without_control_groups_there_is_no_quota(tmp_path: Path) -> None:
    assert quota_cpus(tmp_path / "none", tmp_path) == ALL
