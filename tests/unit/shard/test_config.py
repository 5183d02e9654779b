"""Combinations of flags that are refused, and their defaults."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from caravan_proto.messages.limits import KvLayout
from caravan_shard.backends.toy.model import TOY_FACTS
from caravan_shard.config import ShardConfig
from caravan_shard.cores import usable_cores
from caravan_shard.model_flags import AdapterFile


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
