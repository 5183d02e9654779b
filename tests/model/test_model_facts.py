"""The facts of a GGUF file as llama.cpp reads them."""

from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event

import pytest

from caravan_shard.config import ShardConfig
from caravan_testing.shard_models import DEMO_MODEL
from caravan_testing.waiting import DEADLINE_S

pytestmark = pytest.mark.model


def test_the_demo_models_facts() -> None:
    from caravan_shard.backends.llama.backend import LlamaCppBackend

    backend = LlamaCppBackend(ShardConfig(model=str(DEMO_MODEL), ctx_size=64, parallel=1, threads=1))
    try:
        facts = backend.facts
    finally:
        backend.close()
    assert (facts.architecture, facts.quantization, facts.parameter_count) == ("llama", "Q4_1", 134_515_008)
    file = DEMO_MODEL.stat()
    # The rest of the file is the tokenizer.
    assert 0.95 * file.st_size < facts.weight_bytes < file.st_size
    assert facts.modified_s == int(file.st_mtime)
    assert facts.device_bytes in {0, None}
    metadata = dict(facts.metadata)
    assert list(metadata) == sorted(metadata)
    expected = {
        "general.architecture": "llama",
        "general.file_type": 3,
        "general.license": "apache-2.0",
        "llama.attention.head_count_kv": 3,
        "llama.block_count": 30,
        "llama.context_length": 8192,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.model": "gpt2",
    }
    assert {key: metadata[key] for key in expected} == expected
    assert metadata["tokenizer.ggml.add_bos_token"] is False
    # llama.cpp rounds it, and arrays are not metadata of this kind.
    assert not {"llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base", "general.languages"} & set(metadata)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("llama.block_count", "30", 30),
        ("tokenizer.ggml.padding_token_id", "-1", -1),
        ("llama.rope.freq_base", "10000.000000", None),
        ("llama.rope.scaling.type", "yarn", "yarn"),
        ("llama.attention.causal", "true", True),
        ("general.file_type", "15", 15),
        ("general.base_model.count", "1", 1),
        ("general.version", "2", "2"),
        ("general.base_model.0.version", "1.5", "1.5"),
        ("general.name", "true", "true"),
        ("general.sampling.temp", "0.600000", None),
        ("general.sampling.top_k", "20", None),
        ("llama.odd", str(2**63), None),
    ],
)
def test_a_value_has_the_type_of_its_key(key: str, text: str, value: object) -> None:
    from caravan_shard.backends.llama.metadata import typed

    found = typed(key, text)
    assert (found, type(found)) == (value, type(value))


def test_a_model_stays_in_memory_while_its_vocabulary_is_read() -> None:
    from caravan_shard.backends.llama.model import open_model

    loaded = open_model(ShardConfig(model=str(DEMO_MODEL)))
    began, go_on = Event(), Event()

    def read() -> int:
        with loaded.vocabulary.users.using() as may_use:
            assert may_use
            began.set()
            go_on.wait(DEADLINE_S)
            return len(loaded.vocabulary.pieces())

    with ThreadPoolExecutor(2) as threads:
        reading = threads.submit(read)
        assert began.wait(DEADLINE_S)
        closing = threads.submit(loaded.close)
        assert not wait([closing], timeout=0.2).done
        go_on.set()
        closing.result(DEADLINE_S)
    assert reading.result() == loaded.facts.vocabulary_size
