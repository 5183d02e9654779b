"""What requests get that do not say it: by the flags of a shard, else as the model's file recommends it."""

from caravan_models.gguf_facts import RECOMMENDED
from caravan_proto.messages.sampling import RANGES
from caravan_shard.config import ShardConfig

OF_FILE = {
    "general.sampling.temp": 0.6,
    "general.sampling.top_k": 20.0,
    "general.sampling.top_p": 0.95,
    "general.sampling.penalty_repeat": 1.05,
    "general.sampling.penalty_last_n": -1.0,
    "general.sampling.mirostat": 7.0,
}


def config(**flags: float) -> ShardConfig:
    return ShardConfig(model="m.gguf", **flags)  # type: ignore[arg-type]


def test_each_recommendation_is_a_parameter_of_requests() -> None:
    assert set(RECOMMENDED.values()) <= set(RANGES)


def test_flags_prevail_over_the_file() -> None:
    assert dict(config().request_defaults(OF_FILE.get)) == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05, "repeat_last_n": -1
    }  # fmt: skip
    found = dict(config(temp=0.0, repeat_penalty=1.2, min_p=0.1, max_tokens=100).request_defaults(OF_FILE.get))
    assert (found["temperature"], found["repetition_penalty"], found["min_p"]) == (0.0, 1.2, 0.1)
    assert (found["max_tokens"], found["top_k"]) == (100, 20)


def test_a_file_that_recommends_nothing_leaves_the_defaults_of_the_api() -> None:
    assert config().request_defaults(lambda _key: None) == ()
    assert dict(config(repeat_penalty=1.1).request_defaults(lambda _key: None)) == {
        "repetition_penalty": 1.1, "repeat_last_n": 64
    }  # fmt: skip


def test_the_toy_model_has_those_of_the_flags() -> None:
    from caravan_shard.service.loading import backend_loader

    backend = backend_loader(ShardConfig(backend="fake", temp=0.4))()
    assert backend.facts.request_defaults == (("temperature", 0.4),)
