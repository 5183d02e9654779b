"""From an empty cache to a streamed answer by a model's name alone; the same model in shards and in Python."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from caravan import LLM, AsyncLLM, Executor, ModelError, SamplingParams
from caravan_scheduler.core.catalogue import CatalogueError
from caravan_serve.catalogue.stock import pulled, reference_of
from caravan_testing.programs import address_of, program
from caravan_testing.projectors import write_spelling_projector
from caravan_testing.serve_process import MODEL, serve
from caravan_testing.shard_models import WORDS_MODEL, fetched
from caravan_testing.shard_tiny_llama import write_tiny_llama
from caravan_testing.stand_in_hub import TOKEN, StandInHub, small_gguf, stand_in_hub
from caravan_testing.waiting import eventually

pytestmark = pytest.mark.e2e

NAME, FILE = "demo/smollm2:Q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY = "hf:demo/tiny"
KNOWN, KNOWN_REPOSITORY = "smollm2:135m", "bartowski/SmolLM2-135M-Instruct-GGUF"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInHub]:
    """A hub to which all programs of these tests go, with an empty cache."""
    folder = tmp_path_factory.mktemp("hub")
    with stand_in_hub() as running, pytest.MonkeyPatch.context() as patch:
        model = fetched(WORDS_MODEL)
        write_spelling_projector(folder / "projector.gguf", model, range(4))
        projector = (folder / "projector.gguf").read_bytes()
        running.add("demo/smollm2", {FILE: model.read_bytes(), "mmproj-F16.gguf": projector})
        write_tiny_llama(folder / "tiny.gguf")
        running.add("demo/tiny", {"tiny-F32.gguf": (folder / "tiny.gguf").read_bytes()})
        variables = {"HF_ENDPOINT": running.url, "HF_HUB_CACHE": str(folder / "cache"), "HF_TOKEN": TOKEN}
        for name, value in (variables | {"NO_PROXY": "127.0.0.1"}).items():
            patch.setenv(name, value)
        yield running


def transfers(hub: StandInHub, path: str) -> int:
    """How often the bytes of a file were asked for."""
    sha256 = next(r.files[path].sha256 for r in hub.repositories.values() if path in r.files)
    return sum(seen.path.startswith(f"/{sha256}") for seen in hub.transfers)


def test_a_server_streams_from_an_empty_cache(hub: StandInHub) -> None:
    with (
        serve(f"hf:{NAME}", "-np", "2", "-c", "1024", "-t", "1", "--shards", "2", models=()) as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        (listed,) = client.models.list()
        assert listed.id == NAME
        assert (listed.model_extra or {})["architecture"]["input_modalities"] == ["text", "image"]
        stream = client.completions.create(
            model=NAME, prompt="The capital of France is", max_tokens=4, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert "".join(pieces).strip()
    log = "".join(served.log)
    assert re.search(rf"downloading {NAME}: \d+ % of ", log)
    assert f"checking {NAME}" in log
    # Once for two shards.
    assert transfers(hub, FILE) == 1


async def test_two_shards_on_one_cache_download_once(hub: StandInHub, tmp_path: Path) -> None:
    flags = ("--model", TINY, "--parallel", "1", "--ctx-size", "256", "--threads", "1")
    addresses = [f"unix:{tmp_path}/{number}.sock" for number in range(2)]
    async with (
        program("caravan_shard", *flags, "--address", addresses[0]) as first,
        program("caravan_shard", *flags, "--address", addresses[1]) as second,
    ):
        assert [await address_of(first), await address_of(second)] == addresses
    assert transfers(hub, "tiny-F32.gguf") == 1


async def test_the_library_takes_names_too(hub: StandInHub) -> None:
    greedy = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with LLM(TINY, parallel=1, ctx_size=256, threads=1) as llm:
        [output] = llm.generate("a", greedy)
        tokens = output.outputs[0].token_ids
    assert len(tokens) == 3
    async with AsyncLLM(TINY, parallel=1, ctx_size=256, threads=1) as model:
        assert (await model.generate(["a"], greedy))[0].outputs[0].token_ids == tokens
    with Executor(TINY, parallel=1, ctx_size=256, threads=1) as executor:
        conversation = executor.create()
        conversation.prompt("a")
        executor.infer()
        assert conversation.sample().id == tokens[0]
    with pytest.raises(ModelError, match="has no repository demo/none"):
        LLM("hf:demo/none")
    with pytest.raises(ModelError, match="tinny: there is no such file, and no such name"):
        Executor("tinny")


@pytest.fixture
def no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lead the programs of a test to a hub that does not answer, with an empty cache."""
    for name, value in (("HF_ENDPOINT", "http://127.0.0.1:1"), ("HF_HUB_CACHE", str(tmp_path)), ("NO_PROXY", "*")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)


@pytest.mark.usefixtures("no_hub")
def test_without_a_hub_the_demo_model_answers_to_its_name() -> None:
    fetched(MODEL)
    with serve("-np", "1", "-c", "256", "-t", "1", models=(KNOWN,)) as served:
        body = {"inputs": "The capital of France is", "parameters": {"max_new_tokens": 3}}
        answer = httpx2.post(f"{served.url}/generate", json=body, timeout=600)
        assert answer.status_code == 200, answer.text
        assert answer.json()["generated_text"].strip()
        listed = httpx2.get(f"{served.url}/v1/models", timeout=600).json()["data"]
    assert [model["id"] for model in listed] == [KNOWN]
    (line,) = [line for line in served.log if "Using the demo model instead" in line]
    assert "cannot reach http://127.0.0.1:1" in line


@pytest.mark.usefixtures("no_hub")
def test_without_a_hub_another_name_ends_with_one_line() -> None:
    command = [sys.executable, "-m", "caravan_serve", "serve", "--model", "smollm2", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("caravan serve: error: cannot reach http://127.0.0.1:1: ")
    assert "plain `make run` serves a demo model" in line


@pytest.mark.usefixtures("no_hub")
async def test_the_demo_model_is_not_pulled_in_place_of_another() -> None:
    fetched(MODEL)
    with pytest.raises(CatalogueError, match="smollm2:135m cannot be pulled: the hub does not answer"):
        _ = [told async for told in pulled(reference_of(KNOWN))]


def test_operators_pull_models_and_delete_them(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    flags = ("--models-hub", "on", "-np", "1", "-c", "256", "-t", "1")
    with serve(*flags, models=()) as served, httpx2.Client(base_url=served.url, timeout=600) as client:
        assert client.get("/api/tags").json() == {"models": []}
        lines = [
            json.loads(line) for line in client.post("/api/pull", json={"model": "hf.co/demo/tiny"}).text.splitlines()
        ]
        assert (lines[0], lines[-1]) == ({"status": "pulling manifest"}, {"status": "success"})
        shares = [line.get("completed", 0) / line["total"] for line in lines if line.get("total")]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0
        (model,) = client.get("/api/tags").json()["models"]
        assert model["name"] == "demo/tiny:F32"
        cold = client.post("/api/show", json={"model": model["name"]}).json()
        assert client.get("/api/ps").json() == {"models": []}
        body = {"model": model["name"], "prompt": "a", "raw": True, "stream": False, "options": {"num_predict": 2}}
        assert client.post("/api/generate", json=body).json()["eval_count"] == 2
        warm = client.post("/api/show", json={"model": model["name"]}).json()
        # The quantisation is in the file's name only.
        assert cold["details"] == warm["details"] | {"quantization_level": "F32"}
        assert cold["model_info"].items() <= warm["model_info"].items()
        # What is there is not downloaded again.
        again = client.post("/api/pull", json={"model": "demo/tiny:F32", "stream": False})
        assert again.json() == {"status": "success"}
        for name in ("../../etc/passwd", "http://127.0.0.1/x", "demo/none"):
            refused = client.post("/api/pull", json={"model": name, "stream": False})
            assert refused.status_code == 400, refused.text
        ended = client.post("/api/pull", json={"model": "demo/none"}).text.splitlines()[-1]
        assert "demo/none" in json.loads(ended)["error"]
        deleted = client.request("DELETE", "/api/delete", json={"model": model["name"]})
        assert deleted.status_code == 200, deleted.text
        assert client.get("/v1/models").json()["data"] == []
        assert not list((tmp_path / "cache").rglob("*.gguf"))
        assert client.request("DELETE", "/api/delete", json={"model": model["name"]}).status_code == 400


async def test_clients_see_how_far_downloads_are(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.add("demo/other", {"other-Q8_0.gguf": small_gguf(1 << 16)})
    file = tmp_path / "models.toml"
    file.write_text(f'[[models]]\nname = "mine"\nmodel = "{TINY}"\n')
    flags = ("--models-file", str(file), "--models-hub", "on", "-np", "1", "-c", "256", "-t", "1")
    with serve(*flags, models=()) as served:
        async with httpx2.AsyncClient(base_url=served.url, timeout=600) as client:

            async def seen(path: str, name: str) -> dict[str, Any]:
                """Return the model's status once it is being downloaded."""

                async def look() -> dict[str, Any]:
                    models: list[dict[str, Any]] = (await client.get(path)).json()["data"]
                    return {model["id"]: dict(model["status"]) for model in models}.get(name, {})

                status = await eventually(
                    look, f"{name} is downloaded", lambda found: found.get("value") == "downloading"
                )
                return dict(status["download"])

            # Of a model that a request asks for.
            hub.faults.stall_after = [1000]
            body = {"model": "mine", "prompt": "a", "max_tokens": 1}
            completion = asyncio.create_task(client.post("/v1/completions", json=body))
            download = await seen("/v1/models", "mine")
            assert 0 <= download["completed"] < download["total"] == size_of(hub, "demo/tiny")
            hub.release_stalled()
            assert (await completion).status_code == 200
            [mine] = (await client.get("/models")).json()["data"]
            assert mine["status"] == {"value": "loaded"}
            # Of one that an operator pulls. It cannot be asked for yet.
            hub.faults.stall_after = [1000]
            pull = asyncio.create_task(client.post("/api/pull", json={"model": "demo/other", "stream": False}))
            assert (await seen("/models", "demo/other"))["total"] == 1 << 16
            assert [model["name"] for model in (await client.get("/api/tags")).json()["models"]] == ["mine"]
            assert (await client.post("/v1/completions", json={**body, "model": "demo/other"})).status_code == 404
            hub.release_stalled()
            assert (await pull).json() == {"status": "success"}
            listed = {model["id"]: model["status"] for model in (await client.get("/v1/models")).json()["data"]}
            assert listed == {"mine": {"value": "loaded"}, "demo/other:Q8_0": {"value": "unloaded"}}


@pytest.mark.slow
def test_models_are_made_of_others_and_a_restart_knows_them(
    hub: StandInHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    hub.add(KNOWN_REPOSITORY, {"SmolLM2-135M-Instruct-Q4_K_M.gguf": small_gguf()})
    flags = ("--models-hub", "on", "-np", "1", "-c", "512", "-t", "1", "--log-level", "warning")
    parameters = {"temperature": 0, "num_predict": 3}

    def tags(client: httpx2.Client) -> dict[str, str]:
        """Return the parent of each model."""
        models = client.get("/api/tags").json()["models"]
        return {model["name"]: model["details"]["parent_model"] for model in models}

    with serve(*flags, models=()) as served, httpx2.Client(base_url=served.url, timeout=600) as client:
        assert client.post("/api/pull", json={"model": NAME, "stream": False}).status_code == 200
        body = {"model": "pirate", "from": NAME, "parameters": parameters, "system": "Be a pirate.", "license": "MIT"}
        lines = client.post("/api/create", json=body).text.splitlines()
        assert json.loads(lines[-1]) == {"status": "success"}
        assert client.post("/api/copy", json={"source": "pirate", "destination": "second:latest"}).status_code == 200
        assert tags(client) == {NAME: "", "pirate": NAME, "second": NAME}
        # A known name is downloaded.
        lines = client.post("/api/create", json={"model": "third", "from": KNOWN}).text.splitlines()
        assert json.loads(lines[0])["status"].startswith("pulling")
        assert json.loads(lines[-1]) == {"status": "success"}
        third = f"{KNOWN_REPOSITORY}:Q4_K_M"
        assert tags(client).items() >= {"third": third, third: ""}.items()
        for name in ("third", third):
            assert client.request("DELETE", "/api/delete", json={"model": name}).status_code == 200
        for path, bad, status in (
            ("/api/copy", {"source": "none", "destination": "a"}, 404),
            ("/api/copy", {"source": "pirate", "destination": "../../tmp/a"}, 400),
            ("/api/copy", {"source": "pirate", "destination": NAME}, 400),
            ("/api/create", {"model": "http://127.0.0.1/x", "from": NAME, "stream": False}, 400),
            ("/api/create", {"model": "a", "from": "../../etc/passwd", "stream": False}, 400),
            ("/api/create", {"model": "a", "from": NAME, "quantize": "q4_0"}, 400),
            ("/api/create", {"model": "a", "from": NAME, "files": {"a.gguf": "sha256:0"}}, 400),
            ("/api/create", {"model": "a", "from": NAME, "template": "{{ .Prompt }}"}, 400),
            ("/api/create", {"model": "a", "from": NAME, "parameters": {"temperature": -1}}, 400),
            ("/api/create", {"model": "a", "from": NAME, "parameters": {"num_predict": 0}}, 400),
        ):
            refused = client.post(path, json=bad)
            assert refused.status_code == status, (bad, refused.text)
            assert str(tmp_path) not in refused.text

    with serve(*flags, models=()) as served, httpx2.Client(base_url=served.url, timeout=600) as client:
        assert tags(client) == {NAME: "", "pirate": NAME, "second": NAME}
        shown = client.post("/api/show", json={"model": "second"}).json()
        assert (shown["system"], shown["license"], shown["details"]["parent_model"]) == ("Be a pirate.", "MIT", NAME)
        shown_parameters = [line.split() for line in shown["parameters"].splitlines()]
        assert shown_parameters == [["num_predict", "3"], ["temperature", "0.0"]]
        question = {"role": "user", "content": "Where is the sea?"}
        chat = {"stream": False, "messages": [question]}
        made = client.post("/api/chat", json={"model": "second", **chat}).json()
        messages = [{"role": "system", "content": "Be a pirate."}, question]
        same = {"model": NAME, "stream": False, "messages": messages, "options": parameters}
        plain = client.post("/api/chat", json=same).json()
        for field in ("message", "prompt_eval_count", "eval_count"):
            assert made[field] == plain[field]
        # On other routes it is another name of the model. Both share one process.
        completion = {"model": "pirate", "prompt": "a", "max_tokens": 4, "ignore_eos": True}
        assert client.post("/v1/completions", json=completion).json()["usage"]["completion_tokens"] == 4
        [listed] = client.get("/v1/models").json()["data"]
        assert (listed["id"], listed["aliases"]) == (NAME, ["demo/smollm2", "pirate", "second"])
        assert len(client.get("/api/ps").json()["models"]) == 1
        kept = client.request("DELETE", "/api/delete", json={"model": NAME})
        assert (kept.status_code, "pirate, second" in kept.text) == (400, True)
        for name in ("pirate", "second", NAME):
            assert client.request("DELETE", "/api/delete", json={"model": name}).status_code == 200
        assert tags(client) == {}


def size_of(hub: StandInHub, repository: str) -> int:
    return sum(len(content.data) for content in hub.repositories[repository].files.values())
