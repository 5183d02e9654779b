"""`caravan serve` passes the flags of the shard on unchanged, and starts shards for each model."""

import pytest

from caravan_proto.flags import load
from caravan_serve.cli import (
    ServeError,
    _parse,
    check_models,
    check_rpc,
    draft_tokens,
    model_flags,
    rollback_tokens,
    split_models,
)
from caravan_serve.model_files import ModelFile, local_file, uses_toy
from caravan_shard.config import ShardConfig


def test_flags_of_the_shard_reach_the_shard() -> None:
    given = ["-m", "x.gguf", "--embeddings", "--pooling", "last", "--lora", "poet=a.gguf:0.5", "--port", "0"]
    _serve, router, flags = _parse([*given, "--lora", "b.gguf"])
    assert router.port == 0
    shard = load(ShardConfig, prog="caravan-shard", description="", argv=flags)
    assert (shard.model, shard.embeddings, shard.pooling) == ("x.gguf", True, "last")
    assert [(adapter.name, adapter.scale) for adapter in shard.adapters] == [("poet", 0.5), ("b", 1.0)]


@pytest.mark.parametrize(
    ("flags", "models", "others"),
    [
        (["-np", "4"], [], ["-np", "4"]),
        (["-m", "a.gguf", "-np", "4"], ["a.gguf"], ["-np", "4"]),
        (["-m", "a.gguf", "-mg", "1", "--model", "b.gguf"], ["a.gguf", "b.gguf"], ["-mg", "1"]),
        (["--model=a.gguf", "--main-gpu", "0", "--model=b.gguf"], ["a.gguf", "b.gguf"], ["--main-gpu", "0"]),
        (["-np", "4", "--model"], [""], ["-np", "4"]),
        (["smollm2", "-np", "4"], ["smollm2"], ["-np", "4"]),
        (["a.gguf", "hf:x/y:Q8_0", "-np", "4", "-m", "b.gguf"], ["a.gguf", "hf:x/y:Q8_0", "b.gguf"], ["-np", "4"]),
    ],
)
def test_words_that_come_first_and_each_model_flag_name_a_model(
    flags: list[str], models: list[str], others: list[str]
) -> None:
    assert split_models(flags) == (models, others)


def files(*paths: str) -> list[ModelFile]:
    return [local_file(path) for path in paths]


def test_models_that_cannot_be_told_apart_are_refused() -> None:
    check_models([], ["--lora", "x.gguf"])
    check_models(files("a/x.gguf"), ["--lora", "x.gguf"])
    check_models(files("a/x.gguf", "a/y.gguf"), ["-np", "4"])
    with pytest.raises(ServeError, match=r"its own name\. Given: a/x\.gguf, b/x\.gguf"):
        check_models(files("a/x.gguf", "b/x.gguf"), [])
    with pytest.raises(ServeError, match="--lora needs a single --model"):
        check_models(files("x.gguf", "y.gguf"), ["--lora=z.gguf"])
    check_models(files("x.gguf"), ["--mmproj", "z.gguf"])
    with pytest.raises(ServeError, match="--mmproj needs a single --model"):
        check_models(files("x.gguf", "y.gguf"), ["-mm", "z.gguf"])
    check_models(files("x.gguf"), ["--alias", "z"])
    with pytest.raises(ServeError, match="--alias needs a single --model"):
        check_models(files("x.gguf", "y.gguf"), ["-a", "z"])
    check_models(files("x.gguf"), ["-md", "z.gguf"])
    with pytest.raises(ServeError, match="--model-draft needs a single --model"):
        check_models(files("x.gguf", "y.gguf"), ["--model-draft=z.gguf"])


def test_shards_call_a_model_by_the_name_that_it_was_asked_for_by() -> None:
    named = ModelFile("/cache/x.gguf", "owner/x:Q8_0", named=True)
    assert model_flags(named, [], {}) == ["--model", "/cache/x.gguf", "--alias", "owner/x:Q8_0"]
    assert model_flags(named, ["--alias=y"], {}) == ["--model", "/cache/x.gguf"]
    assert model_flags(named, ["-a", "y"], {}) == ["--model", "/cache/x.gguf"]
    assert model_flags(named, [], {"CARAVAN_ALIAS": "y"}) == ["--model", "/cache/x.gguf"]
    assert model_flags(local_file("/models/x.gguf"), [], {}) == ["--model", "/models/x.gguf"]


def test_the_toy_model_needs_no_file() -> None:
    assert uses_toy(["--backend", "fake"], {})
    assert uses_toy(["-np", "4", "--backend=fake"], {})
    assert uses_toy([], {"CARAVAN_BACKEND": "fake"})
    assert not uses_toy(["--backend", "llama", "--alias", "fake"], {})


def test_a_draft_model_switches_speculation_on() -> None:
    assert draft_tokens(0, ["-np", "4"], {}) == 0
    assert draft_tokens(0, ["-md", "d.gguf"], {}) == 8
    assert draft_tokens(0, ["--model-draft=d.gguf"], {}) == 8
    assert draft_tokens(0, [], {"CARAVAN_MODEL_DRAFT": "d.gguf"}) == 8
    assert draft_tokens(3, ["-md", "d.gguf"], {}) == 3


def test_speculation_lets_shards_keep_what_recurrent_models_need_for_it() -> None:
    assert rollback_tokens(0, [], {}) == []
    assert rollback_tokens(3, ["-np", "4"], {}) == ["--rollback-tokens", "3"]
    assert rollback_tokens(64, [], {}) == ["--rollback-tokens", "8"]
    assert rollback_tokens(3, ["--rollback-tokens=1"], {}) == []
    assert rollback_tokens(3, [], {"CARAVAN_ROLLBACK_TOKENS": "0"}) == []


def test_rpc_servers_are_for_a_single_shard() -> None:
    check_rpc(1, ["--rpc", "a:1"], {"CARAVAN_RPC": "a:1"})
    check_rpc(2, ["-np", "4"], {"CARAVAN_RPC": ""})
    for flags, environment in ((["--rpc=a:1"], {}), (["--rpc", "a:1"], {}), ([], {"CARAVAN_RPC": "a:1"})):
        with pytest.raises(ServeError, match=r"--rpc needs a single shard\. Given: 2"):
            check_rpc(2, flags, environment)
