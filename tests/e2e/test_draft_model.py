"""A server with a draft model, as a user starts it."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI
from openai.types import Completion

from caravan_testing.serve_process import MODEL, Served, serve
from caravan_testing.shard_models import WORDS_MODEL, fetched
from caravan_testing.shard_tiny_mamba import write_tiny_mamba

PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "1, 2, 3, 4, 5, 6, 7, 8,")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    draft_model = tmp_path_factory.mktemp("draft") / "draft.gguf"
    draft_model.symlink_to(fetched(WORDS_MODEL))
    flags = ("-md", str(draft_model), "-np", "4", "-c", "1024", "-t", "1", "--exact")
    with serve(*flags, models=(WORDS_MODEL,)) as running:
        yield running


def complete(client: OpenAI, prompt: str, **fields: object) -> Completion:
    return client.completions.create(
        model="any", prompt=prompt, max_tokens=30, seed=5, extra_body={"ignore_eos": True} | fields
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_texts_are_the_same_with_and_without_drafts(served: Served, temperature: float) -> None:
    with OpenAI(base_url=f"{served.url}/v1", api_key="-") as client:
        for prompt in PROMPTS:
            plain = complete(client, prompt, temperature=temperature, speculate=0)
            # Drafts are on by default.
            drafted = complete(client, prompt, temperature=temperature)
            assert drafted.choices[0].text == plain.choices[0].text


def test_the_api_names_the_draft_model(served: Served) -> None:
    with urllib.request.urlopen(f"{served.url}/info") as response:
        assert b'"draft_model":"draft.gguf"' in response.read()


def test_a_draft_model_with_another_vocabulary_ends_the_server(tmp_path: Path) -> None:
    other = write_tiny_mamba(tmp_path / "other.gguf")
    command = [sys.executable, "-m", "caravan_serve", "serve", "-m", str(MODEL), "-md", str(other), "--port", "0"]
    done = subprocess.run([*command, "-c", "256", "-np", "1"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 2
    assert "other.gguf cannot draft for" in done.stderr
    assert "another vocabulary: it has 259 tokens, the model 49152" in done.stderr
