"""LoRA adapters, compared with llama-cpp-python's Llama(lora_path=...)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from caravan import LLM, SamplingParams
from caravan_models.contents import SeenFile
from caravan_proto.errors import ShardError
from caravan_proto.messages.adapters import LoadedAdapter
from caravan_proto.messages.commands import Chunk, FilterBatch, PrefixCopy
from caravan_proto.messages.limits import KvLayout
from caravan_shard.protocol.commands import LoadAdapter
from caravan_shard.protocol.results import AdapterUnloaded, Refusal
from caravan_shard.startup_error import StartupError
from caravan_testing.shard_builders import first_chunk, load_entry, save_entry, with_parameters
from caravan_testing.shard_models import DEMO_MODEL, WORDS_MODEL, ModelDriver, fetched
from caravan_testing.shard_tiny_lora import DEMO, Adapted, write_tiny_lora
from caravan_testing.shard_tiny_mamba import write_tiny_mamba

pytestmark = pytest.mark.model

TEXT = "Once upon a time there was a small dog who"
NEW_TOKENS = 10
# The adapters' names with their scales.
ADAPTERS = {"one": 1.0, "half": 0.5, "other": 1.0}


WORDS = Adapted(embedding=64, layers=2)


@dataclass(frozen=True)
class Files:
    """A model, and adapter files by name; two names have the same file."""

    model: Path
    adapters: dict[str, Path]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((WORDS_MODEL, WORDS), id="words"),
        pytest.param((DEMO_MODEL, DEMO), id="demo", marks=pytest.mark.slow),
    ],
)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    model, size = request.param
    folder = tmp_path_factory.mktemp("adapters")
    one, other = (write_tiny_lora(folder / f"{name}.gguf", seed, size) for seed, name in enumerate(("one", "other")))
    return Files(fetched(model), {"one": one, "half": one, "other": other})


@pytest.fixture(scope="module")
def expected(files: Files) -> dict[str, list[int]]:
    """The outputs of Llama with each adapter and with none."""
    from llama_cpp import Llama

    outputs = {}
    for name, scale in {"": 0.0, **ADAPTERS}.items():
        llama = Llama(
            str(files.model),
            lora_path=str(files.adapters[name]) if name else None,
            lora_scale=scale,
            n_ctx=256,
            n_threads=1,
            n_threads_batch=1,
            flash_attn=True,
            verbose=False,
        )
        tokens = llama.tokenize(TEXT.encode(), add_bos=True, special=True)
        answer = llama.generate(tokens, temp=0.0, repeat_penalty=1.0)
        outputs[name] = [token for token, _ in zip(answer, range(NEW_TOKENS), strict=False)]
        llama.close()
    return outputs


@pytest.fixture(scope="module", params=list(KvLayout), ids=lambda layout: layout.value)
def loaded(request: pytest.FixtureRequest, files: Files) -> Iterator[ModelDriver]:
    """A shard with the adapters, in each layout."""
    lora = tuple(f"{name}={files.adapters[name]}:{scale}" for name, scale in ADAPTERS.items())
    driver = ModelDriver(files.model, ctx_size=1024, kv_layout=request.param.value, lora=lora)
    yield driver
    driver.engine.close()


@pytest.fixture
def driver(loaded: ModelDriver) -> ModelDriver:
    """The shard, empty."""
    loaded.engine.release_all()
    return loaded


def chunk(sequence_id: int, tokens: list[int], adapter: str, copy: PrefixCopy | None = None) -> Chunk:
    whole = first_chunk(sequence_id, tokens, max_new=NEW_TOKENS, ignore_eos=True, copy=copy)
    return with_parameters(whole, adapter=adapter)


def test_outputs_with_an_adapter_equal_llamas(driver: ModelDriver, expected: dict[str, list[int]]) -> None:
    assert driver.backend.facts.adapters == tuple(ADAPTERS)
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected), "the adapters change nothing"
    tokens = driver.tokens(TEXT)
    names = ["one", "", "half", "other"]
    for key, name in enumerate(names):
        driver.prefill(chunk(key, tokens, name))
    for _ in range(0, NEW_TOKENS, 3):
        for key in range(4):
            driver.decode([key], steps=3)
    for key, name in enumerate(names):
        assert driver.output[key] == expected[name], name


def test_copies_and_saved_runs_keep_their_adapter(driver: ModelDriver, expected: dict[str, list[int]]) -> None:
    tokens = driver.tokens(TEXT)
    driver.prefill(chunk(3, tokens[:-2], "one"))
    driver.prefill(chunk(0, tokens, ""))
    driver.prefill(chunk(1, tokens[-2:], "one", PrefixCopy(source_id=3, length=len(tokens) - 2)))
    assert driver.save(save_entry(1, tokens, adapter="one")) == [True]
    driver.decode([1], steps=2)
    driver.decode([0], steps=2)
    assert driver.load(load_entry(2, tokens, adapter="one")) == [True]
    driver.prefill(chunk(2, tokens[-2:], "one", PrefixCopy(source_id=2, length=len(tokens) - 2)))
    for key in (2, 0, 1):
        driver.decode([key])
    assert driver.output[1] == driver.output[2] == expected["one"]
    assert driver.output[0] == expected[""]


def test_adapters_apply_in_every_layout(files: Files) -> None:
    driver = ModelDriver(files.model, ctx_size=1024, lora=(str(files.adapters["one"]),))
    tokens = driver.tokens(TEXT)
    for key, name in enumerate(["one", ""]):
        driver.prefill(chunk(key, tokens, name))
    outputs: list[dict[int, list[int]]] = []
    for layout in (KvLayout.UNIFIED, KvLayout.SPLIT):
        # The context that is left had the adapter applied.
        driver.decode([1], steps=1)
        driver.decode([0], steps=2)
        assert driver.set_layout(layout) == []
    for key in (0, 1):
        driver.decode([key])
    outputs.append(dict(driver.output))
    driver.engine.release_all()
    for key, name in enumerate(["one", ""]):
        driver.prefill(chunk(key, tokens, name))
        driver.decode([key])
    assert driver.output == outputs[0]
    assert driver.output[0] != driver.output[1]
    driver.engine.close()


def test_a_program_loads_adapters_while_its_model_is_open(files: Files, expected: dict[str, list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(files.model, ctx_size=1024, threads=1) as llm:
        for name, scale in ADAPTERS.items():
            llm.load_adapter(name, files.adapters[name], scale=scale)
        assert llm.list_adapters() == [*ADAPTERS]
        for name, tokens in expected.items():
            assert [*llm.generate(TEXT, params, adapter=name)[0].outputs[0].token_ids] == tokens
        llm.unload_adapter("one")
        assert llm.list_adapters() == ["half", "other"]


def test_embeddings_do_not_depend_on_adapters(files: Files) -> None:
    options = {"ctx_size": 512, "ubatch_size": 64, "embeddings": True}
    plain = ModelDriver(files.model, **options)
    tokens = plain.tokens(TEXT)
    (vector,) = plain.backend.embed([tokens])
    plain.engine.close()
    driver = ModelDriver(files.model, **options, lora=(str(files.adapters["one"]),))
    driver.prefill(chunk(0, tokens, "one"))
    assert driver.backend.embed([tokens])[0].tolist() == pytest.approx(vector.tolist(), abs=1e-5)
    driver.engine.close()


def test_adapters_loaded_while_it_runs_equal_those_of_the_start(files: Files, expected: dict[str, list[int]]) -> None:
    driver = ModelDriver(files.model, ctx_size=1024)
    tokens, adapters = driver.tokens(TEXT), driver.engine.adapters

    def load(name: str, path: Path, scale: float) -> LoadedAdapter | Refusal:
        return adapters.load(LoadAdapter(f"{name} key", SeenFile.at(path), scale, most=3))

    driver.prefill(chunk(3, tokens, ""))
    for _ in range(2):  # the second time after all were freed
        for name, scale in ADAPTERS.items():
            assert isinstance(load(name, files.adapters[name], scale), LoadedAdapter)
        refused = load("fourth", files.adapters["one"], 1.0)
        assert isinstance(refused, Refusal)
        assert "--max-loras allows 3 adapters" in refused.sentence
        for key, name in enumerate(ADAPTERS):
            driver.prefill(chunk(key, tokens, f"{name} key"))
        assert adapters.unload("one key") == Refusal(
            ShardError.ADAPTER_IN_USE, "sequences with adapter 'one' have not ended"
        )
        for key, name in enumerate(ADAPTERS):
            driver.decode([key])
            assert driver.output[key] == expected[name], name
            # The last one is applied to the context when it is freed.
            assert adapters.unload(f"{name} key") == AdapterUnloaded()
        driver.engine.filter_batch(FilterBatch(keep=[3]))
        assert isinstance(driver.try_prefill(chunk(0, tokens, "one key")), Refusal)
    driver.decode([3])
    assert driver.output[3] == expected[""]
    driver.engine.close()


def test_unsuitable_files_are_startup_errors(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"garbage")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(write_tiny_lora(tmp_path / "whole.gguf", 1, WORDS).read_bytes()[:4_000])
    cases = {
        str(tmp_path / "nowhere.gguf"): "cannot read the adapter .*nowhere.gguf: No such file",
        f"x={garbage}": "is no GGUF file; pass --lora",
        f"x={broken}": "cannot use .*broken.gguf as adapter 'x'",
        f"x={DEMO_MODEL}": "cannot use",
        f"x={write_tiny_lora(tmp_path / 'a.gguf', 1, replace(WORDS, architecture='gemma3'))}": "cannot use",
        f"x={write_tiny_lora(tmp_path / 'b.gguf', 1, WORDS, inputs=512)}": "cannot use",
        f"x={write_tiny_lora(tmp_path / 'c.gguf', 1, WORDS, kind='other')}": "cannot use",
        f"x={write_tiny_mamba(tmp_path / 'd.gguf')}": "cannot use",
    }
    for lora, message in cases.items():
        with pytest.raises(StartupError, match=message):
            ModelDriver(fetched(WORDS_MODEL), ctx_size=512, lora=(lora,))
