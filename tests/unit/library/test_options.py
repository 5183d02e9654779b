"""The options of a model are flags of the programs, with their limits."""

import dataclasses
import typing
from typing import Any

import pytest

from caravan import llm
from caravan.local_model import LocalModel
from caravan.options import ENGINE_OPTIONS, ModelOptions, ServerOptions, split_options
from caravan_proto.flags import from_values
from caravan_router.config import RouterConfig
from caravan_shard.config import ShardConfig


def test_every_option_is_a_flag_of_the_same_type() -> None:
    hints = typing.get_type_hints(ModelOptions)
    of_shard, of_router = typing.get_type_hints(ShardConfig), typing.get_type_hints(RouterConfig)
    fields = {field.name for config in (ShardConfig, RouterConfig) for field in dataclasses.fields(config)}
    for name, hint in hints.items():
        assert name in fields
        flag = (of_router if name in ENGINE_OPTIONS else of_shard)[name]
        assert flag in (hint, hint | None) or name in {"lora", "override_tensor"}


def test_every_option_of_a_server_is_a_flag_of_the_router() -> None:
    flags = typing.get_type_hints(RouterConfig)
    for name, hint in typing.get_type_hints(ServerOptions).items():
        assert flags[name] in (hint, hint | None) or name == "cors_allow_origin"
    assert not ENGINE_OPTIONS & ServerOptions.__annotations__.keys()


def test_options_go_to_the_model_or_to_the_engine() -> None:
    assert split_options("a.gguf", {"parallel": 2, "speculate": 4}) == (
        {"model": "a.gguf", "parallel": 2},
        {"speculate": 4},
    )


def test_speculation_lets_recurrent_models_take_drafts_back() -> None:
    for options, expected in (
        ({}, 0),
        ({"speculate": 3}, 3),
        ({"speculate": 12}, 8),
        ({"speculate": 4, "rollback_tokens": 0}, 0),
    ):
        assert LocalModel("a.gguf", options)._shard_config.rollback_tokens == expected


def test_the_target_of_a_list_of_prompts_can_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []

    class Opened:
        loop = None

        def __init__(self, _model: str, options: dict[str, Any]) -> None:
            opened.append(options)

        def close(self) -> None: ...

    monkeypatch.setattr(llm, "OpenedModel", Opened)
    llm.LLM("a.gguf").close()
    llm.LLM("a.gguf", target_itl_ms=50.0, parallel=2).close()
    assert opened == [{"target_itl_ms": 1000.0}, {"target_itl_ms": 50.0, "parallel": 2}]


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(TypeError, match="unknown options: context, thread"):
        split_options("a.gguf", {"thread": 2, "context": 1})


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"parallel": 0}, ValueError, r"parallel must be >= 1 and <= 256\. Given: 0"),
        ({"flash_attn": "maybe"}, ValueError, r"flash_attn must be one of on, off, auto\. Given: 'maybe'"),
        ({"batch_size": 4, "parallel": 8}, ValueError, "batch-size must be >= parallel"),
        ({"parallel": "8"}, TypeError, r"parallel must be a whole number\. Given: '8'"),
        ({"parallel": True}, TypeError, r"parallel must be a whole number\. Given: True"),
        ({"parallel": None}, TypeError, r"parallel must be a whole number\. Given: None"),
        ({"embeddings": 1}, TypeError, r"embeddings must be true or false\. Given: 1"),
        ({"lora": [1]}, TypeError, r"lora must be text\. Given: 1"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(values: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_values(ShardConfig, {"backend": "fake"} | values)


def test_a_flag_without_a_default_may_be_none() -> None:
    config = from_values(ShardConfig, {"backend": "fake", "threads": None, "lora": ["a=b.gguf"], "cache_dir_space": 1})
    assert (config.threads, config.lora, config.cache_dir_space) == (None, ("a=b.gguf",), 1)
