"""`caravan serve` parses the flags of its shards, and divides the host among them."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from caravan_proto.config_file import NO_VALUES
from caravan_proto.flags import as_flags, load
from caravan_serve.cli import read_flags
from caravan_serve.serve_flags import serve_parser
from caravan_serve.shard_flags import (
    ModelFile,
    ServeError,
    check_models,
    check_rpc,
    checked,
    combined,
    device_shares,
    draft_tokens,
    find_devices,
    host_shares,
    is_toy,
    local_file,
    of_model,
    rollback_tokens,
    shard_values,
)
from caravan_shard.config import ShardConfig


def parse_shard_flags(flags: Sequence[str], environ: Mapping[str, str]) -> tuple[list[str], dict[str, Any]]:
    parser = serve_parser()
    return shard_values(parser, parser.parse_models(flags), environ, NO_VALUES)


def given(*flags: str, **environ: str) -> dict[str, Any]:
    return parse_shard_flags(flags, environ)[1]


def test_flags_of_the_shard_reach_the_shard() -> None:
    words = ["-m", "x.gguf", "--embeddings", "--pooling", "last", "--lora", "poet=a.gguf:0.5", "--port", "0"]
    words += ["-ngl", "-1", "--no-mmap", "--log-level", "debug"]
    _serve, router, models, values = read_flags([*words, "--lora", "b.gguf"])
    assert router.port == 0
    shard = load(ShardConfig, prog="caravan-shard", description="", argv=[*as_flags(values), "--model", *models])
    assert (shard.model, shard.embeddings, shard.pooling) == ("x.gguf", True, "last")
    assert (shard.gpu_layers, shard.mmap, shard.log_level) == (-1, False, "debug")
    assert [(adapter.name, adapter.scale) for adapter in shard.adapters] == [("poet", 0.5), ("b", 1.0)]


@pytest.mark.parametrize(
    ("flags", "environ", "models"),
    [
        (["-np", "4"], {}, []),
        (["-m", "a.gguf", "-np", "4"], {"CARAVAN_MODEL": "c.gguf"}, ["a.gguf"]),
        (["-m", "a.gguf", "-mg", "1", "--model", "b.gguf"], {}, ["a.gguf", "b.gguf"]),
        (["--model=a.gguf", "--main-gpu", "0", "--model=b.gguf"], {}, ["a.gguf", "b.gguf"]),
        (["smollm2", "-np", "4"], {}, ["smollm2"]),
        (["-np", "4", "smollm2"], {}, ["smollm2"]),
        (["a.gguf", "hf:x/y:Q8_0", "-np", "4", "-m", "b.gguf"], {}, ["a.gguf", "hf:x/y:Q8_0", "b.gguf"]),
        ([], {"CARAVAN_MODEL": "a,b.gguf"}, ["a,b.gguf"]),
    ],
)
def test_words_and_each_model_flag_name_a_model(
    flags: list[str], environ: Mapping[str, str], models: list[str]
) -> None:
    found, values = parse_shard_flags(flags, environ)
    assert found == models
    assert "model" not in values


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--model"], "argument -m/--model: expected one argument"),
        (["-np", "0"], "argument --parallel/-np: must be >= 1 and <= 256. Given: 0"),
        (["--paralel", "4"], "unknown flag --paralel; did you mean --parallel?"),
        (
            ["--address", "unix:/x"],
            "unknown flag --address: it is for caravan-shard, and caravan serve sets it for each shard",
        ),
    ],
)
def test_wrong_flags_of_shards_are_usage_errors(
    flags: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_shard_flags(flags, {})
    assert ended.value.code == 2
    assert f"caravan serve: error: {problem}" in capsys.readouterr().err


def test_what_the_environment_says_of_one_shard_is_not_passed_on() -> None:
    assert given(CARAVAN_ADDRESS="0.0.0.0:50051", CARAVAN_SHARD_ID="a", CARAVAN_PARALLEL="4") == {"parallel": 4}


def test_flags_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ServeError, match="exact needs separate cells"):
        checked({"model": "x.gguf", **given("--exact", "--kv-layout", "unified")})
    assert checked({"model": "x.gguf"}) == {"model": "x.gguf"}


def test_repeatable_flags_of_a_model_are_added_to_those_of_all() -> None:
    of_all, of_one = given("--lora", "a.gguf", "-np", "4"), given("--lora", "b.gguf", "-np", "2")
    assert combined(of_all, of_one) == {"lora": ("a.gguf", "b.gguf"), "parallel": 2}


def files(*paths: str) -> list[ModelFile]:
    return [local_file(path) for path in paths]


def test_models_that_cannot_be_told_apart_are_refused() -> None:
    check_models(files("a/x.gguf", "a/y.gguf"), given("-np", "4"))
    with pytest.raises(ServeError, match=r"its own name\. Given: a/x\.gguf, b/x\.gguf"):
        check_models(files("a/x.gguf", "b/x.gguf"), {})


@pytest.mark.parametrize("field", ["lora", "mmproj", "alias", "model_draft"])
def test_what_belongs_to_one_model_needs_a_single_one_also_in_the_environment(field: str) -> None:
    flag = f"--{field.replace('_', '-')}"
    for values in (given(flag, "z.gguf"), given(f"{flag}=z.gguf"), given(**{f"CARAVAN_{field.upper()}": "z.gguf"})):
        check_models([], values)
        check_models(files("a/x.gguf"), values)
        with pytest.raises(ServeError, match=f"{flag} needs a single --model"):
            check_models(files("x.gguf", "y.gguf"), values)


def test_shards_call_a_model_by_the_name_that_it_was_asked_for_by() -> None:
    named = ModelFile("/cache/x.gguf", "owner/x:Q8_0", named=True)
    assert of_model(named, {}) == {"model": "/cache/x.gguf", "alias": "owner/x:Q8_0"}
    assert of_model(named, given("-a", "y")) == {"model": "/cache/x.gguf"}
    assert of_model(named, given(CARAVAN_ALIAS="y")) == {"model": "/cache/x.gguf"}
    assert of_model(local_file("/models/x.gguf"), {}) == {"model": "/models/x.gguf"}


def test_the_toy_model_needs_no_file() -> None:
    assert is_toy(given("--backend", "fake"))
    assert is_toy(given(CARAVAN_BACKEND="fake"))
    assert not is_toy(given("--backend", "llama", "--alias", "fake", CARAVAN_BACKEND="fake"))


def test_a_folder_stands_for_its_only_model(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=f"^{tmp_path} has no GGUF file: name a file"):
        local_file(str(tmp_path))
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf", "readme.md"):
        (tmp_path / name).touch()
    first = tmp_path / "m-00001-of-00002.gguf"
    assert local_file(str(tmp_path)) == ModelFile(str(first), first.name)
    (tmp_path / "n.gguf").touch()
    with pytest.raises(ServeError, match=r"has the models m-00001-of-00002\.gguf, n\.gguf: .*--models-dir"):
        local_file(str(tmp_path))


def test_a_draft_model_switches_speculation_on() -> None:
    assert draft_tokens(0, given("-np", "4")) == 0
    assert draft_tokens(0, given("-md", "d.gguf")) == 8
    assert draft_tokens(0, given(CARAVAN_MODEL_DRAFT="d.gguf")) == 8
    assert draft_tokens(3, given("-md", "d.gguf")) == 3


@pytest.mark.parametrize(("kind", "tokens"), [("none", 0), ("auto", 8), ("draft-mtp", 8)])
def test_a_head_switches_speculation_on(kind: str, tokens: int) -> None:
    assert draft_tokens(0, given("--spec-type", kind)) == tokens


def test_speculation_lets_shards_keep_what_recurrent_models_need_for_it() -> None:
    assert rollback_tokens(0) == {}
    assert rollback_tokens(3) == {"rollback_tokens": 3}
    assert rollback_tokens(64) == {"rollback_tokens": 8}


def test_rpc_servers_are_for_a_single_shard() -> None:
    check_rpc(1, given("--rpc", "a:1"))
    check_rpc(2, given("-np", "4", CARAVAN_RPC=""))
    for values in (given("--rpc", "a:1"), given(CARAVAN_RPC="a:1")):
        with pytest.raises(ServeError, match=r"--rpc needs a single shard\. Given: 2"):
            check_rpc(2, values)


def test_each_shard_gets_its_share_of_the_host() -> None:
    cores = len(os.sched_getaffinity(0))
    assert host_shares(1) == {}
    assert host_shares(2) == {
        "threads": max(1, cores // 2),
        "cache_ram": ShardConfig(backend="fake").cache_ram // 2,
    }


@pytest.mark.parametrize(
    ("devices", "shards", "shares"),
    [
        ([], 2, [{}, {}]),
        (["A", "B"], 2, [{"device": "A"}, {"device": "B"}]),
        (["A", "B", "C"], 2, [{"device": "A,C"}, {"device": "B"}]),
        (["A"], 2, [{"device": "A"}, {"device": "A"}]),
        (["A", "B"], 3, [{"device": "A"}, {"device": "B"}, {"device": "A"}]),
    ],
)
def test_each_shard_gets_devices_of_its_own_where_there_are_enough(
    devices: list[str], shards: int, shares: list[dict[str, str]]
) -> None:
    assert device_shares(devices, shards) == shares


@pytest.mark.parametrize(
    ("shards", "flags", "environ"),
    [
        (1, ["-ngl", "99"], {}),
        (2, ["-ngl", "0"], {}),
        (2, [], {"CARAVAN_GPU_LAYERS": "0"}),
        (2, ["--backend", "fake"], {}),
        (2, [], {"CARAVAN_BACKEND": "fake"}),
        (2, ["-ngl", "99", "--device=CUDA1"], {}),
        (2, ["-ngl", "99"], {"CARAVAN_DEVICE": "CUDA1"}),
    ],
)
def test_devices_are_not_divided_where_that_is_not_wanted(
    shards: int, flags: Sequence[str], environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_kwargs: pytest.fail("no devices are looked for"))
    assert find_devices(shards, given(*flags, **environ)) == []


def test_devices_to_divide_are_those_that_a_shard_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = subprocess.CompletedProcess([], 0, stdout="CUDA0\t8192 MiB\ta GPU\nCUDA1\t8192 MiB\ta GPU\n")
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_kwargs: listing)
    for values in (
        {},
        given("-ngl", "99"),
        given("-ngl", "0", "-ngl", "99", CARAVAN_GPU_LAYERS="0"),
        given(CARAVAN_GPU_LAYERS="-1"),
    ):
        assert find_devices(2, values) == ["CUDA0", "CUDA1"]
