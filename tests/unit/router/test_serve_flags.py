"""`caravan serve` passes the flags of the shard on unchanged."""

from caravan_proto.flags import load
from caravan_router.serve.cli import _parse
from caravan_shard.config import ShardConfig


def test_flags_of_the_shard_reach_the_shard() -> None:
    given = ["-m", "x.gguf", "--embeddings", "--pooling", "last", "--lora", "poet=a.gguf:0.5", "--port", "0"]
    _serve, router, flags = _parse([*given, "--lora", "b.gguf"])
    assert router.port == 0
    shard = load(ShardConfig, prog="caravan-shard", description="", argv=flags)
    assert (shard.model, shard.embeddings, shard.pooling) == ("x.gguf", True, "last")
    assert [(adapter.name, adapter.scale) for adapter in shard.adapters] == [("poet", 0.5), ("b", 1.0)]
