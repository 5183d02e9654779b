"""Client libraries, each in its own environment that `make test-clients` sets up, against one server."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from caravan_testing.gguf_file import fields_of
from caravan_testing.serve_process import MODEL, ROOT, Served, serve
from caravan_testing.shard_models import fetched
from caravan_testing.stand_in_hub import stand_in_hub
from caravan_testing.waiting import DEADLINE_S


def write_hf_tokenizer(model: Path, folder: Path) -> Path:
    """Write what `AutoTokenizer` reads, for a byte-level vocabulary with merges such as SmolLM2's, to ``folder``."""
    fields = fields_of(model)
    tokens, merges, kinds = (fields[f"tokenizer.ggml.{name}"].value for name in ("tokens", "merges", "token_type"))
    control = 3
    special = [index for index, kind in enumerate(kinds) if kind == control]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index in special
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    end = tokens[fields["tokenizer.ggml.eos_token_id"].value]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end})
    )
    return folder


pytestmark = pytest.mark.clients

SESSIONS = Path(__file__).parent / "clients"
# The demo model's greedy answers to the prompts.
TEXT = " Paris.\n\nThe United States has a population of approximately"
ANSWER = "The sea is a vast"
STOPPED = " four, five,"
VECTOR_SIZE = 576
SHORT_TOKENS = 12
# Of a benchmark program.
REQUESTS = 8


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    # The unified layout rounds by the order of cells, which may decide between near-equal tokens.
    with serve("-np", "4", "-c", "32768", "-t", "1", "--kv-layout", "split", "--embeddings") as running:
        yield running


def session(name: str, served: Served, *arguments: str, part: str = "") -> dict[str, Any]:
    """Run the client's script, or the ``part`` of it in a file of its own, in its environment; return what it got."""
    python = ROOT / f".cache/clients/{name}/bin/python"
    assert python.exists(), f"no environment for {name}: run `make test-clients`"
    script = SESSIONS / f"{name.replace('-', '_')}{part}_session.py"
    run = subprocess.run(
        [python, script, served.url, *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr
    got: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return got


def test_langchain_openai_completes_chats_calls_tools_and_embeds(served: Served) -> None:
    got = session("langchain-openai", served)
    completions, chat = got["completions"], got["chat"]
    assert completions["text"] == completions["streamed"] == completions["batch"][0] == TEXT
    assert completions["stopped"] == STOPPED
    assert "`temperature` must be strictly positive. Given: -1.0" in completions["error"]
    assert chat["text"].startswith(ANSWER)
    assert chat["streamed"] == chat["text"]
    assert chat["tokens"] == 24
    assert set(chat["structured"]) == {"city", "days"}
    ((name, arguments),) = chat["calls"]
    assert (name, set(arguments)) == ("weather", {"city", "days"})
    assert got["embeddings"] == [VECTOR_SIZE, VECTOR_SIZE]


def test_langchain_huggingface_completes_streams_and_stops(served: Served) -> None:
    got = session("langchain-huggingface", served)
    assert got["text"] == got["streamed"] == TEXT
    assert got["stopped"] == STOPPED
    assert got["sampled"][0] == got["sampled"][1]


def test_litellm_completes_chats_calls_tools_and_embeds(served: Served) -> None:
    got = session("litellm", served)
    completions, chat = got["completions"], got["chat"]
    assert completions["text"] == completions["streamed"] == completions["streamed_async"] == TEXT
    assert (completions["finish"], completions["tokens"]) == ("length", 12)
    assert completions["stopped"] == STOPPED
    assert "`temperature` must be strictly positive. Given: -1" in completions["error"]
    assert chat["text"].startswith(ANSWER)
    assert chat["streamed"] == got["ollama"] == chat["text"]
    assert set(chat["structured"]) == {"city"}
    ((name, arguments),) = chat["calls"]
    assert (name, set(arguments)) == ("weather", {"city"})
    assert got["embeddings"] == [VECTOR_SIZE, VECTOR_SIZE]
    assert got["overflows"] == [True, True, True]


def test_the_ollama_client_generates_chats_and_lists_models(served: Served) -> None:
    got = session("ollama", served)
    assert got["text"] == got["streamed"] == TEXT
    assert got["done"] == got["last"] == [True, "length", SHORT_TOKENS]
    assert got["models"] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert {"completion", "tools", "embedding"} <= set(got["capabilities"])
    details = {"format": "gguf", "family": "llama", "parameter_size": "134.52M", "quantization_level": "Q4_1"}
    for described in got["details"]:
        assert described == details | {"parent_model": "", "families": ["llama"]}
    assert got["sizes"] == [96_576_768] * 2
    assert got["modified"] == [True, True]
    assert got["running"] == ["SmolLM2-135M-Instruct.Q4_1.gguf", 2300, 8192]
    info = {"general.architecture": "llama", "general.parameter_count": 134_515_008, "llama.context_length": 8192}
    assert info.items() <= got["model_info"].items()
    assert got["chat"].startswith(ANSWER)
    assert got["chat"] == got["chat_streamed"] == got["chat_async"]
    assert set(got["structured"]) == {"city"}
    assert got["offered"]
    first, second = got["contexts"]
    assert second[: len(first)] == first
    assert len(second) > len(first) + SHORT_TOKENS
    assert got["raw_context"] is None
    assert got["embeddings"] == [4, 4, VECTOR_SIZE]
    assert got["older_embedding"] == VECTOR_SIZE
    # The longest text that is embedded has as many tokens as a ubatch.
    few, many = got["embedded_tokens"]
    assert few < many == 512
    assert got["error"] == [400, "Input validation error: `options.temperature` must be strictly positive. Given: -1.0"]


def test_the_ollama_client_pulls_runs_and_deletes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in_hub() as hub:
        content = fetched(MODEL).read_bytes()
        hub.add("demo/smollm2", {MODEL.name: content})
        for variable, value in (("HF_ENDPOINT", hub.url), ("HF_HUB_CACHE", str(tmp_path)), ("NO_PROXY", "127.0.0.1")):
            monkeypatch.setenv(variable, value)
        with serve("--models-hub", "on", "-np", "1", "-c", "1024", "-t", "1", models=()) as server:
            got = session("ollama", server, "demo/smollm2", part="_library")
    assert (got["statuses"][0], got["statuses"][-1]) == ("pulling manifest", "success")
    digest, sizes = f"sha256:{hashlib.sha256(content).hexdigest()}", [done for _, done, _ in got["progress"]]
    assert {(name, total) for name, _, total in got["progress"]} == {(digest, len(content))}
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(content)
    assert got["name"] == "demo/smollm2:Q4_1"
    assert got["idle"] == []
    assert got["chat"].startswith(ANSWER)
    assert got["chat_end"] == [True, "length"]
    assert got["text"] == TEXT
    assert got["running"] == ["demo/smollm2:Q4_1", True]
    assert got["listed"] == [len(content), True, got["digest"]]
    # Before it was loaded, the model was described by its file, and alike.
    served_facts = {key: got["shown"]["modelinfo"].pop(key) for key in ("caravan.context_length", "caravan.vocab_size")}
    assert served_facts["caravan.context_length"] == 1024
    assert got["cold"] == got["shown"]
    names = ["demo/smollm2:Q4_1", "brief", "short"]
    assert got["made"] == ["success", "success", 2, ["num_predict", "2"], names]
    assert (got["again"], got["deleted"]) == ("success", "success")
    assert got["left"] == []
    assert got["refused"] == 404


def test_the_anthropic_package_creates_streams_calls_tools_and_counts(served: Served) -> None:
    got = session("anthropic", served)
    whole, streamed, called = got["whole"], got["streamed"], got["called"]
    assert whole["text"].startswith(ANSWER)
    assert (whole["reason"], whole["output_tokens"]) == ("max_tokens", 24)
    assert whole["input_tokens"] == whole["counted"] > 0
    assert whole["request_id"]
    assert whole["stopped"] == ["The sea is", "stop_sequence", " a"]
    assert streamed["text"] == whole["text"] == "".join(streamed["texts"])
    assert streamed["tokens"] == 24
    kinds = [kind for kind in streamed["kinds"] if kind != "content_block_delta"]
    ends = ["content_block_stop", "message_delta", "message_stop"]
    # The package hides pings.
    assert [kind for kind in kinds if kind != "ping"] == ["message_start", "content_block_start", *ends]
    assert (called["name"], called["reason"], set(called["input"])) == ("weather", "tool_use", {"city"})
    assert called["streamed"] == called["input"]
    assert called["answered"] == 1
    assert "`temperature` must be strictly positive. Given: -1.0" in got["errors"][0]
    assert "`messages` cannot be empty" in got["errors"][1]
    assert got["run"] == [["tool_use"], ["tool_use"]]
    assert got["models"] == ["active"]
    assert got["asynchronous"].startswith(ANSWER)


def test_the_anthropic_package_with_the_toy_model(toy: Served) -> None:
    got = session("anthropic", toy)
    assert got["batched"] == {
        "results": {"good": "succeeded", "bad": "errored"},
        "counts": [0, 1, 1, 0, 0],
        "cancelled": "canceling",
        "listed": True,
        "deleted": "message_batch_deleted",
    }
    whole, streamed, called = got["whole"], got["streamed"], got["called"]
    assert 0 < whole["output_tokens"] <= 24
    assert whole["input_tokens"] == whole["counted"] > 0
    assert streamed["text"] == whole["text"] == "".join(streamed["texts"])
    assert streamed["tokens"] == whole["output_tokens"]
    assert (called["name"], called["reason"], set(called["input"])) == ("weather", "tool_use", {"city"})
    assert called["streamed"] == called["input"]
    assert len(got["errors"]) == 2


def checked_google_genai(served: Served) -> dict[str, Any]:
    """Return what the google-genai package got, whose parts agree with each other."""
    got = session("google-genai", served)
    whole = got["whole"]
    assert got["models"] == [f"models/{whole['model']}"]
    assert got["model"] == ["generateContent", "countTokens", "embedContent", "batchEmbedContents"]
    assert whole["text"] == whole["streamed"]
    assert whole["total"] == whole["tokens"] > 0
    assert whole["reason"] == whole["last_reason"]
    assert whole["counted"] == whole["prompt"] > 0
    assert whole["candidates"] == 2
    assert list(got["structured"]["schema"]) == ["days", "city"]
    assert set(got["structured"]["json_schema"]) == {"city"}
    called = got["called"]
    assert (called["name"], set(called["args"]), called["answered"]) == ("weather", {"city"}, 1)
    assert called["streamed"] == called["args"]
    assert got["chatted"][1:3] == ["user", "model"]
    sampling, cached, overflow = got["errors"]
    assert sampling[:2] == cached[:2] == overflow[:2] == [400, "INVALID_ARGUMENT"]
    assert "`generationConfig.temperature` must be >= 0.0" in sampling[2]
    assert "`cachedContent` is not supported" in cached[2]
    assert overflow[2].startswith("The input token count (")
    assert got["asynchronous"]
    assert got["embedded"][2:] == [8, 8]
    return got


def test_the_google_genai_package_with_the_demo_model(served: Served) -> None:
    got = checked_google_genai(served)
    assert got["whole"]["text"].startswith(ANSWER)
    assert got["asynchronous"].startswith(ANSWER)
    assert got["embedded"][:2] == [VECTOR_SIZE] * 2


def test_the_google_genai_package_with_the_toy_model() -> None:
    with serve("--backend", "fake", "--fake-token-ms", "0.1", "-np", "4", "-c", "8192", "--embeddings") as running:
        checked_google_genai(running)


def test_the_llm_command_completes_chats_and_calls_tools(served: Served) -> None:
    got = session("llm", served)
    assert "OpenAI Completion: caravan-completions" in got["models"]
    assert got["text"] == got["streamed"] == TEXT
    assert got["chat"].startswith(ANSWER)
    assert got["chat_streamed"] == got["chat"]
    assert set(json.loads(got["structured"])) == {"city"}
    assert got["tool"]
    assert not got["tool"].startswith("error")
    assert (
        "maximum context length is 8192 tokens. However, you requested 100001 tokens (1 in the `prompt`" in got["error"]
    )


def test_lm_evaluation_harness_scores_a_task(served: Served, tmp_path: Path) -> None:
    got = session("lm-eval", served, str(write_hf_tokenizer(MODEL, tmp_path)))
    assert got["accuracy"] == 1.0
    assert [len(choices) for choices in got["logprobs"]] == [3, 2, 3, 2]
    prompt = "Question: What is the capital of France?\nAnswer: Paris"
    body = json.dumps({"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1}).encode()
    request = urllib.request.Request(f"{served.url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        columns = json.load(response)["choices"][0]["logprobs"]
    assert columns["tokens"][-1] == " Paris"
    assert got["logprobs"][0][0] == pytest.approx(columns["token_logprobs"][-1], abs=0.1)


def test_openai_python_uses_websockets_lanes_and_steering() -> None:
    # So slow that a long answer is under way when it is steered.
    with serve("--backend", "fake", "--fake-step-ms", "10", "-np", "4", "-c", "8192") as slow:
        got = session("openai-agents", slow, part="_websocket")
    assert got["text"]
    continued, cached = got["second"]
    assert continued
    # All but the last token, which was never read.
    assert cached >= got["before"] - 1
    assert got["lanes"] == ["a", "b"]
    assert got["steered"] == [True, "steered"]
    assert got["tokens"] < 1000, "it ends soon"
    reason, cached = got["twice"]
    assert reason == "steered"
    assert cached >= got["tokens"] - 2, "its cells are kept"
    assert got["error"] == "previous_response_not_found"


def test_openai_agents_loops_over_a_tool_streams_and_keeps_sessions(served: Served) -> None:
    got = session("openai-agents", served)
    assert len(got["called"]) == 1
    assert got["kinds"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
    assert got["final"]
    assert got["streamed"] == got["whole"]
    assert json.loads(got["whole"])["answer"]
    assert got["session"] == ["user", "assistant", "user", "assistant"]
    assert (got["popped"], got["left"]) == ("assistant", 3)
    assert got["cached"] > 0
    assert got["requests"] == 1


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server with the toy model for benchmark programs, and a tokenizer that they read."""
    tokenizer = write_hf_tokenizer(MODEL, tmp_path_factory.mktemp("tokenizer"))
    with serve("--backend", "fake", "--model", "toy", "--fake-token-ms", "0.1", "-c", "65536", models=()) as running:
        yield running, tokenizer
        assert "status=4" not in "".join(running.log)


def measure(name: str, *arguments: str, folder: Path) -> str:
    """Run a benchmark program, which reaches no hub, in ``folder``; return what it prints."""
    program = ROOT / f".cache/clients/{name}/bin/{name}"
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "HF_HUB_OFFLINE": "1", "COLUMNS": "250"}
    run = subprocess.run(
        [program, *arguments], capture_output=True, text=True, timeout=600, check=False, cwd=folder, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout + run.stderr


@pytest.mark.programs
def test_guidellm_prints_its_tables(measured: tuple[Served, Path], tmp_path: Path) -> None:
    served, tokenizer = measured
    flags = {
        "backend": f"kind=openai_http,target={served.url},model=toy",
        "profile": "kind=synchronous",
        "constraint": f"kind=max_requests,count={REQUESTS}",
        "data": "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "tokenizer": f"kind=hf_auto,model={tokenizer}",
        "output": "kind=console",
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    printed = measure("guidellm", "run", *words, "--disable-progress", folder=tmp_path)
    for title in ("Request Token Statistics", "Request Latency Statistics", "Server Throughput Statistics"):
        assert title in printed, printed
    # Each reply has as many tokens as were asked for.
    assert re.search(r"synchronous +\| +[\d.]+ +\| +[\d.]+ +\| +8\.0 +\| +8\.0 +\|", printed), printed


@pytest.mark.programs
def test_inference_perf_prints_its_tables(measured: tuple[Served, Path], tmp_path: Path) -> None:
    served, tokenizer = measured
    lengths = {"min": 8, "max": 8, "mean": 8, "std_dev": 0, "total_count": REQUESTS}
    config = {
        "api": {"type": "completion", "streaming": True},
        "data": {"type": "random", "input_distribution": lengths, "output_distribution": lengths},
        "load": {"type": "constant", "num_workers": 1, "stages": [{"rate": REQUESTS, "duration": 1}]},
        "server": {"type": "vllm", "model_name": "toy", "base_url": served.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(tokenizer)},
        "storage": {"local_storage": {"path": str(tmp_path / "reports")}},
    }
    file = tmp_path / "config.yml"
    # JSON is YAML.
    file.write_text(json.dumps(config))
    printed = measure("inference-perf", "--config_file", str(file), folder=tmp_path)
    for title in ("Throughput and Goodput Summary", "Request & Token Latency", "Token Length Aggregates"):
        assert title in printed, printed
    (summary,) = (tmp_path / "reports").rglob("summary_lifecycle_metrics.json")
    assert json.loads(summary.read_text())["successes"]["count"] == REQUESTS


@pytest.mark.programs
def test_aiperf_prints_its_tables(measured: tuple[Served, Path], tmp_path: Path) -> None:
    served, tokenizer = measured
    # Offline, it takes a tokenizer from the cache of the hub only.
    cached, commit = tmp_path / ".cache/huggingface/hub/models--demo--words", "0" * 40
    shutil.copytree(tokenizer, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)
    flags = {
        "model": "toy",
        "url": served.url,
        "endpoint-type": "chat",
        "tokenizer": "demo/words",
        "concurrency": "2",
        "request-count": str(REQUESTS),
        "synthetic-input-tokens-mean": "32",
        "output-tokens-mean": "8",
        "ui-type": "simple",
        "artifact-dir": str(tmp_path / "reports"),
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", value)]
    printed = measure("aiperf", "profile", *words, "--streaming", folder=tmp_path)
    for row in ("Time to First Token", "Inter Token Latency", "Output Token Throughput", "Request Count"):
        assert row in printed, printed
