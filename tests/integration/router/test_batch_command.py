"""`caravan batch`, and openai-python's files and batches, over the toy model."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import DEADLINE_S, wait_until

CARAVAN = (sys.executable, "-m", "caravan_serve", "batch")
OWN_SERVER = ("-m", "toy.gguf", "--serve", "backend=fake", "--serve", "fake-step-ms=3", "--serve", "parallel=8")
COUNT = 200


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve("--backend", "fake", "--fake-step-ms", "2", "-np", "8", "-c", "8192", models=("toy.gguf",)) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none") as made:
        yield made


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    whole = {"messages": [{"role": "user", "content": f"Say {custom_id}"}], "max_tokens": 4, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": whole}


def written(folder: Path, lines: Sequence[object]) -> Path:
    path = folder / "requests.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def environment(folder: Path, server: str = "http://127.0.0.1:9") -> dict[str, str]:
    # A server on this host is reached without the proxy, which answers nothing.
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}
    return {**os.environ, **proxy, "HOME": str(folder), "CARAVAN_SERVER": server}


def batch(folder: Path, *words: str, server: str) -> "subprocess.CompletedProcess[str]":
    command = (*CARAVAN, "requests.jsonl", "-o", "out.jsonl", *words)
    return subprocess.run(
        command, cwd=folder, env=environment(folder, server), capture_output=True, text=True, timeout=DEADLINE_S
    )


def test_a_running_server_answers_in_the_order_of_the_requests(served: Served, tmp_path: Path) -> None:
    written(tmp_path, [line("b"), line("refused", messages=[]), line("a", model="another")])
    done = batch(tmp_path, "-m", "toy.gguf", server=served.url)
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines() == [
        "2 of 3 requests answered: out.jsonl",
        "caravan batch: error: 1 requests failed; out.jsonl says why",
    ]
    answers = read(tmp_path / "out.jsonl")
    assert [one["custom_id"] for one in answers] == ["b", "refused", "a"]
    assert [one["response"]["status_code"] for one in answers] == [200, 400, 200]
    assert [answers[place]["response"]["body"]["model"] for place in (0, 2)] == ["toy.gguf"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "requests.jsonl"]


@pytest.mark.parametrize(
    ("lines", "words", "answer"),
    [
        (["no request"], (), "requests.jsonl has no request, such as"),
        ([line("a"), line("a")], (), "line 2: `custom_id` must be unique in the file. Given twice: 'a'"),
        ([line("a")], ("-m", "llama"), "has no model llama; it has toy.gguf"),
    ],
)
def test_what_cannot_be_answered_is_said_and_may_be_repeated(
    served: Served, tmp_path: Path, lines: list[object], words: tuple[str, ...], answer: str
) -> None:
    written(tmp_path, lines)
    for _ in range(2):
        done = batch(tmp_path, *words, server=served.url)
        assert done.returncode == 1
        assert answer in done.stderr
        assert not (tmp_path / "out.jsonl").exists()


def test_a_changed_file_is_not_mixed_with_the_answers_to_another(served: Served, tmp_path: Path) -> None:
    written(tmp_path, [line("a"), line("a")])
    assert batch(tmp_path, server=served.url).returncode == 1
    written(tmp_path, [line("a")])
    assert "delete out.jsonl.batch to begin again" in batch(tmp_path, server=served.url).stderr


def answered(folder: Path) -> int:
    """The lines that the server of a command has answered."""
    file = folder / "out.jsonl.batch" / "state.sqlite-files" / "bulk.sqlite"
    with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as tables:
        ((count, ended),) = tables.execute(
            "SELECT (SELECT count(answer) FROM lines), (SELECT count(*) FROM batches WHERE status = 'completed')"
        )
    # Of a batch that has ended, no lines are left.
    return COUNT if ended else int(count)


@pytest.mark.slow
def test_the_command_goes_on_after_kill_9(tmp_path: Path) -> None:
    written(tmp_path, [line(f"r{number}") for number in range(COUNT)])
    command = (*CARAVAN, "requests.jsonl", "-o", "out.jsonl", *OWN_SERVER)
    # No server is at the address of the environment, and none is named by a flag.
    env = {name: value for name, value in environment(tmp_path).items() if name != "CARAVAN_SERVER"}
    record = tmp_path / "out.jsonl.batch" / "batch.json"
    moments: list[Callable[[], object]] = [
        record.exists,
        lambda: json.loads(record.read_bytes())["file"],
        lambda: answered(tmp_path) >= 30,
        lambda: answered(tmp_path) >= 60,
    ]
    for moment in moments:
        with subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.DEVNULL) as process:
            wait_until(moment, "the moment of the kill", ignoring=(OSError, sqlite3.Error))
            process.send_signal(signal.SIGKILL)
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=4 * DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert [one["custom_id"] for one in read(tmp_path / "out.jsonl")] == [f"r{number}" for number in range(COUNT)]
    assert not record.parent.exists()


def test_openai_python_uploads_lists_and_deletes_files(client: OpenAI) -> None:
    made = client.files.create(
        file=("lines.jsonl", b'{"a": 1}\n'), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert (made.filename, made.bytes, made.purpose) == ("lines.jsonl", 9, "batch")
    assert made.expires_at == made.created_at + 3600
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == b'{"a": 1}\n'
    others = [client.files.create(file=(f"{number}", b"x"), purpose="user_data") for number in range(3)]
    listed = [one.id for one in client.files.list(purpose="user_data", limit=2, order="asc")]
    assert listed == [one.id for one in others], "both pages"
    for one in (made, *others):
        assert client.files.delete(one.id).deleted
    with pytest.raises(NotFoundError):
        client.files.retrieve(made.id)


def test_openai_python_runs_a_batch(client: OpenAI, tmp_path: Path) -> None:
    path = written(tmp_path, [line("good"), line("bad", top_p=2)])
    with path.open("rb") as file:
        uploaded = client.files.create(file=file, purpose="batch")
    begun = client.batches.create(
        input_file_id=uploaded.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"job": "nightly"},
        output_expires_after={"anchor": "created_at", "seconds": 7200},
    )
    assert begun.metadata == {"job": "nightly"}
    wait_until(lambda: client.batches.retrieve(begun.id).status, "the batch has ended", "completed".__eq__)
    done = client.batches.retrieve(begun.id)
    assert done.request_counts is not None
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (2, 1, 1)
    (good,) = [json.loads(text) for text in client.files.content(done.output_file_id or "").text.splitlines()]
    (bad,) = [json.loads(text) for text in client.files.content(done.error_file_id or "").text.splitlines()]
    assert (good["custom_id"], good["response"]["status_code"]) == ("good", 200)
    assert (bad["custom_id"], bad["response"]["status_code"]) == ("bad", 400)
    assert begun.id in [one.id for one in client.batches.list(limit=1)]


def test_openai_python_cancels_a_batch(client: OpenAI, tmp_path: Path) -> None:
    lines = [line(f"r{number}", max_tokens=2000, ignore_eos=True) for number in range(50)]
    uploaded = client.files.create(file=written(tmp_path, lines), purpose="batch")
    begun = client.batches.create(input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h")
    assert client.batches.cancel(begun.id).status in {"cancelling", "cancelled"}
    wait_until(lambda: client.batches.retrieve(begun.id).status, "the batch has ended", "cancelled".__eq__)
