"""Sequences with adapters on the toy model, whose output depends on the adapter; a chat template of its own."""

from pathlib import Path

import pytest

from caravan_proto.errors import ShardError
from caravan_proto.messages.commands import Chunk, Decode, Load, PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_shard.backends.llama.model.loading import template_in
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_shard.protocol.results import Refusal
from caravan_shard.startup_error import StartupError
from caravan_testing.shard_builders import (
    EngineDriver,
    first_chunk,
    load_entry,
    next_chunk,
    save_entry,
    toy_prompt,
    with_parameters,
)
from caravan_testing.toy_oracle import expected_output

PROMPT = toy_prompt("a prompt for everyone")
ADAPTERS = ["", "one", "other"]


def expected(adapter: str, prompt: list[int] = PROMPT) -> list[int]:
    return expected_output(prompt, 20, ignore_eos=True, adapter=adapter)


def chunk(sequence_id: int, adapter: str, tokens: list[int] = PROMPT, *, copy: PrefixCopy | None = None) -> Chunk:
    return with_parameters(first_chunk(sequence_id, tokens, copy=copy, max_new=20, ignore_eos=True), adapter=adapter)


@pytest.fixture(params=list(KvLayout), ids=lambda layout: layout.value)
def driver(request: pytest.FixtureRequest) -> EngineDriver:
    """An empty shard with two adapters."""
    return EngineDriver(ToyBackend(layout=request.param, adapters=ADAPTERS[1:]))


def test_each_adapter_has_its_own_output(driver: EngineDriver) -> None:
    assert len({tuple(expected(adapter)) for adapter in ADAPTERS}) == 3
    for key, adapter in enumerate(ADAPTERS):
        driver.prefill(chunk(key, adapter))
        driver.prefill(chunk(key + 4, adapter), riders=[key])
    for _ in range(20):
        for key in range(3):
            driver.decode([key, key + 4], steps=1)
    for key, adapter in enumerate(ADAPTERS):
        assert driver.output[key] == driver.output[key + 4] == expected(adapter)


def test_a_prompt_in_chunks_keeps_its_adapter(driver: EngineDriver) -> None:
    driver.prefill(chunk(1, ""))
    first = first_chunk(0, PROMPT[:9], total=len(PROMPT), last=False, max_new=20, ignore_eos=True)
    driver.prefill(with_parameters(first, adapter="one"))
    driver.decode([1], steps=2)
    driver.prefill(next_chunk(0, 9, PROMPT[9:]))
    driver.decode([0])
    driver.decode([1])
    assert driver.output == {0: expected("one"), 1: expected("")}


def test_prefixes_are_shared_within_an_adapter(driver: EngineDriver) -> None:
    driver.prefill(chunk(0, "one"))
    tail, prefix = toy_prompt(" and more"), PrefixCopy(source_id=0, length=len(PROMPT))
    driver.prefill(chunk(1, "one", tail, copy=prefix), riders=[0])
    for adapter in ("", "other"):
        refused = driver.try_prefill(chunk(2, adapter, tail, copy=prefix))
        assert isinstance(refused, Refusal)
        assert refused.error is ShardError.BAD_REQUEST
    driver.decode([0, 1])
    assert driver.output[1] == expected("one", PROMPT + tail)
    # A parked sequence keeps its adapter.
    driver.prefill(park={0: 5})
    assert isinstance(driver.try_prefill(chunk(0, "", tail, copy=PrefixCopy(source_id=0, length=5))), Refusal)
    driver.prefill(chunk(0, "one", tail, copy=PrefixCopy(source_id=0, length=5)))
    driver.decode([0])
    assert driver.output[0] == expected("one", PROMPT[:5] + tail)


def test_a_decode_with_two_adapters_is_refused(driver: EngineDriver) -> None:
    for key, adapter in enumerate(ADAPTERS):
        driver.prefill(chunk(key, adapter))
    refusal = driver.engine.begin_decode(Decode(sequence_ids=[0, 2], max_steps=1))
    assert refusal is not None
    assert refusal.error is ShardError.BAD_REQUEST
    assert refusal.sentence.endswith("Given: '', 'other'")


def test_saved_sequences_keep_their_adapter(driver: EngineDriver) -> None:
    driver.prefill(chunk(0, "one"))
    assert driver.save(save_entry(0, PROMPT, adapter="one", release=True)) == [True]
    driver.prefill(chunk(0, ""))
    assert driver.load(load_entry(1, PROMPT, adapter="one")) == [True]
    for adapter in ADAPTERS:
        answer = driver.try_prefill(chunk(2, adapter, [65], copy=PrefixCopy(source_id=1, length=len(PROMPT))))
        assert isinstance(answer, Refusal) == (adapter != "one")
    refused = driver.engine.load(Load(entries=[load_entry(3, PROMPT, adapter="unknown")]), 0)
    assert isinstance(refused, Refusal)
    assert refused.error is ShardError.BAD_REQUEST
    # Resumed by a chunk of its last token.
    driver.prefill(chunk(1, "one", PROMPT[-1:], copy=PrefixCopy(source_id=1, length=len(PROMPT) - 1)))
    driver.decode([1], steps=5)
    driver.decode([0])
    driver.decode([1])
    assert driver.output[0] == expected("")
    assert driver.output[1] == expected("one")


def test_sequences_keep_their_adapter_in_the_other_layout() -> None:
    driver = EngineDriver(ToyBackend(adapters=ADAPTERS[1:], other_layouts=[KvLayout.SPLIT]))
    for key, adapter in enumerate(ADAPTERS):
        driver.prefill(chunk(key, adapter))
    assert driver.set_layout(KvLayout.SPLIT) == []
    for key, adapter in enumerate(ADAPTERS):
        driver.decode([key])
        assert driver.output[key] == expected(adapter)


def test_a_template_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages[0].content }} é")
    assert template_in(path) == "{{ messages[0].content }} é"
    for content in (b" \n", b"\xff", b"x" * ((256 << 10) + 1)):
        path.write_bytes(content)
        with pytest.raises(StartupError, match="--chat-template-file"):
            template_in(path)
    with pytest.raises(StartupError, match="cannot be read"):
        template_in(tmp_path / "none")
