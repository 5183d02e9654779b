"""The facts of a GGUF file as llama.cpp reads them, and of the models that tests and the kit for GPUs make."""

import os
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
from gpu.kit.models import DENSE, MIXTURE, ModelShape, small, write_model

from caravan_models.cached_model import local_model, parts_of
from caravan_models.errors import FetchError
from caravan_models.gguf_header import read_header
from caravan_proto.messages.model import FillTokens
from caravan_shard.config import ShardConfig
from caravan_testing.shard_builders import first_chunk
from caravan_testing.shard_models import DEMO_MODEL, TOKENIZER, ModelDriver, fetched
from caravan_testing.shard_tiny_llama import Parts, write_tiny_llama
from caravan_testing.shard_tiny_ranker import write_tiny_ranker
from caravan_testing.speaking_model import cue, write_speaking_model
from caravan_testing.waiting import DEADLINE_S

pytestmark = pytest.mark.model

# The demo model has none of its own but for <repo_name>, so a file's metadata name three of its control tokens.
KEYS = {"fim_pre": 5, "fim_suf": 6, "fim_mid": 7, "fim_sep": 8}

CALL = '<tool_call>\n{"name": "search", "arguments": {"city": "%s", "count": 3}}\n</tool_call>'
TEXTS = (
    CALL % "Paris",
    # It differs from the first in the middle only, so that most pieces would be equal.
    CALL % "Łódź 東京 \U0001f600",
    "Let me see.\n\n" + CALL % "Bern",
    "yes",
    # A short text that is the end of another.
    "count",
)


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
    from caravan_shard.backends.llama.model.loading import typed

    found = typed(key, text)
    assert (found, type(found)) == (value, type(value))


def test_a_model_stays_in_memory_while_its_vocabulary_is_read() -> None:
    from caravan_shard.backends.llama.model.loading import open_model

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


def test_a_model_in_parts_is_loaded_from_any_of_them_if_all_are_there(tmp_path: Path) -> None:
    from caravan_shard.backends.llama.model.loading import open_model
    from caravan_shard.startup_error import StartupError

    first = write_tiny_llama(tmp_path / "m.gguf", parts=Parts(8))
    parts = parts_of(first)
    assert len(parts) > 2
    loaded = open_model(ShardConfig(model=str(parts[1])))
    assert loaded.facts.name == first.name
    assert tuple(file.path for file in loaded.files.model) == parts
    loaded.close()
    parts[1].unlink()
    for path in (parts[0], parts[2]):
        with pytest.raises(StartupError, match=f"{path.name} is a part of a model, and .* lacks {parts[1].name}"):
            open_model(ShardConfig(model=str(path)))
        with pytest.raises(FetchError, match=f"{path.name} is a part of a model, and .* lacks {parts[1].name}"):
            local_model(path)


def test_a_whole_model_may_have_the_name_of_a_part(tmp_path: Path) -> None:
    from caravan_shard.backends.llama.model.loading import open_model

    path = write_tiny_llama(tmp_path / "m-00001-of-00002.gguf")
    loaded = open_model(ShardConfig(model=str(path)))
    assert [file.path for file in loaded.files.model] == [path]
    loaded.close()


def test_why_a_model_cannot_be_loaded_is_a_part_of_the_error(tmp_path: Path) -> None:
    from caravan_shard.backends.llama.model.loading import open_model
    from caravan_shard.startup_error import StartupError

    path = write_tiny_llama(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(StartupError, match=r"cannot load .*memory is short: .*attn_q"):
        open_model(ShardConfig(model=str(path)))


def test_a_file_without_a_pre_tokenizer_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from caravan_shard.backends.llama.model.loading import open_model

    path = write_tiny_llama(tmp_path / "m.gguf", tokenizer_of=fetched(TOKENIZER))
    open_model(ShardConfig(model=str(path))).close()
    assert "pre-tokenizer" not in caplog.text
    path.write_bytes(path.read_bytes().replace(b"tokenizer.ggml.pre", b"tokenizer.ggml.prx"))
    open_model(ShardConfig(model=str(path))).close()
    assert "m.gguf does not name its pre-tokenizer" in caplog.text


def test_a_ranker_without_the_separator_of_its_pairs_is_refused(tmp_path: Path) -> None:
    from caravan_shard.backends.llama.backend import LlamaCppBackend
    from caravan_shard.startup_error import StartupError

    path = write_tiny_ranker(tmp_path / "r.gguf", template="", separates=True)
    with pytest.raises(StartupError, match=r"r.gguf need the separator \(sep\) token"):
        LlamaCppBackend(ShardConfig(model=str(path), ctx_size=64, parallel=1, threads=1, embeddings=True))
    path = write_tiny_ranker(tmp_path / "r.gguf", separates=True)
    LlamaCppBackend(ShardConfig(model=str(path), ctx_size=64, parallel=1, threads=1, embeddings=True)).close()


@pytest.mark.parametrize("layout", ["split", "unified"])
def test_logits_may_depend_on_company_in_the_unified_layout(layout: str, tmp_path: Path) -> None:
    from caravan_shard.backends.llama.backend import LlamaCppBackend

    path = write_tiny_llama(tmp_path / "m.gguf")
    backend = LlamaCppBackend(ShardConfig(model=str(path), ctx_size=512, parallel=2, threads=1, kv_layout=layout))
    backend.close()
    assert backend.numerics.same_in_company in ((False,) if layout == "unified" else (True, False))


def test_the_end_token_that_the_file_names_ends_an_output(tmp_path: Path) -> None:
    from caravan_shard.backends.llama.model.loading import open_model

    # llama.cpp takes it out of the tokens that end an output where the vocabulary has the other one.
    path = write_tiny_ranker(tmp_path / "m.gguf", controls=["<|tool_response>"], end=2)
    loaded = open_model(ShardConfig(model=str(path)))
    assert loaded.facts.eos_text == "</s>"
    assert 2 in loaded.facts.eos_token_ids
    loaded.close()


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    from caravan_shard.backends.llama.model.loading import open_model
    from caravan_shard.startup_error import StartupError

    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    model = write_tiny_llama(tmp_path / "m.gguf")
    for config in (
        ShardConfig(model=str(pipe)),
        ShardConfig(model=str(model), mmproj=str(pipe)),
        ShardConfig(model=str(tmp_path)),
    ):
        with pytest.raises(StartupError, match="is no file"):
            open_model(config)
    with pytest.raises(FetchError, match="is no file"):
        read_header(pipe)


@pytest.mark.parametrize("shape", [DENSE, MIXTURE], ids=["dense", "experts"])
def test_the_prompt_decides_what_follows(shape: ModelShape, tmp_path: Path) -> None:
    vocabulary = write_tiny_llama(tmp_path / "vocabulary.gguf")
    path = write_model(tmp_path / "model.gguf", replace(small(shape), tokens=512), vocabulary)
    driver = ModelDriver(path, ctx_size=256)
    try:
        texts = [driver.alone(driver.tokens(prompt), 16) for prompt in ("one", "two", "one")]
    finally:
        driver.backend.close()
    assert texts[0] == texts[2] != texts[1]
    assert len(set(texts[0])) > 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), None),
        (("fim_pre", "fim_suf"), None),
        (("fim_pre", "fim_suf", "fim_mid"), FillTokens(prefix=5, suffix=6, middle=7, repository=4)),
        (tuple(KEYS), FillTokens(prefix=5, suffix=6, middle=7, repository=4, file=8)),
    ],
)
def test_a_model_fills_in_if_it_has_three_tokens(given: tuple[str, ...], expected: FillTokens | None) -> None:
    from llama_cpp import Llama

    from caravan_shard.backends.llama.model.vocabulary import LlamaVocabulary

    overrides: dict[str, bool | int | float | str] = {f"tokenizer.ggml.{key}_token_id": KEYS[key] for key in given}
    model = Llama(str(DEMO_MODEL), vocab_only=True, verbose=False, kv_overrides=overrides)
    assert LlamaVocabulary(model._model.vocab).fill_tokens() == expected
    model.close()


def test_a_begin_token_is_named_where_the_model_wants_one() -> None:
    from llama_cpp import Llama

    from caravan_shard.backends.llama.model.vocabulary import LlamaVocabulary

    overrides: dict[str, bool | int | float | str] = {
        f"tokenizer.ggml.{key}_token_id": token for key, token in KEYS.items()
    }
    model = Llama(
        str(DEMO_MODEL), vocab_only=True, verbose=False, kv_overrides=overrides | {"tokenizer.ggml.add_bos_token": True}
    )
    fill = LlamaVocabulary(model._model.vocab).fill_tokens()
    assert fill is not None
    assert fill.begin == 1
    model.close()


def said(driver: ModelDriver, prompt: str) -> str:
    """Return what the model says behind ``prompt`` up to its end token."""
    driver.engine.release_all()
    tokens = driver.tokens(prompt)
    driver.prefill(first_chunk(0, tokens, max_new=200))
    driver.decode([0])
    *words, end = driver.output[0]
    assert end in driver.backend.facts.eos_token_ids
    return b"".join(driver.backend.vocabulary.piece(token).data for token in words).decode()


def test_a_word_of_the_prompt_decides_which_text_it_says(tmp_path: Path) -> None:
    path = write_speaking_model(tmp_path / "speaking.gguf", TEXTS, "{{ messages[0].content }}")
    driver = ModelDriver(path, ctx_size=4096)
    assert driver.backend.facts.chat_template == "{{ messages[0].content }}"
    for number, text in enumerate(TEXTS):
        for prompt in (f"Say {cue(number)}.", f"{cue(number)} <tool_call> {{'name': 'x'}} {'many words ' * 50}\n"):
            assert said(driver, prompt) == text
    driver.engine.close()
    assert write_speaking_model(tmp_path / "again.gguf", TEXTS, "{{ messages[0].content }}").read_bytes() == (
        path.read_bytes()
    )


def test_a_text_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is there twice"):
        write_speaking_model(tmp_path / "speaking.gguf", ["yes", "yes"], "")
