"""A batch whose router and shards are killed again and again: every line is answered exactly once."""

import json
import os
import random
import signal
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from openai import APIConnectionError, OpenAI

from caravan_testing.serve_process import Served, start
from caravan_testing.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LINES, KILLS, SHARDS = 1_200, 8, 2
TOY = ("--backend", "fake", "--fake-step-ms", "1", "-np", "32", "-c", "32768", "--shards", str(SHARDS))


def requests(path: Path) -> Path:
    with path.open("w") as file:
        for number in range(LINES):
            messages = [{"role": "user", "content": f"Say {number}"}]
            body = {"messages": messages, "max_tokens": 1 + number % 3}
            one = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(one) + "\n")
    return path


def answered(served: Served, batch_id: str) -> int:
    """How many lines have an answer; all if the batch has ended."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
        batch = client.batches.retrieve(batch_id)
        assert batch.status in {"validating", "in_progress", "finalizing", "completed"}, batch.status
        return LINES if batch.status == "completed" else batch.request_counts.completed  # type: ignore[union-attr]


def serving(served: Served) -> int:
    """How many shards serve."""
    with urllib.request.urlopen(f"{served.url}/admin/shards", timeout=DEADLINE_S) as response:
        return sum(shard["state"] == "serving" for shard in json.load(response)["shards"])


def test_every_line_is_answered_once_though_routers_and_shards_are_killed(tmp_path: Path) -> None:
    rng = random.Random(5)
    moments = sorted(rng.randrange(LINES) for _ in range(KILLS))
    victims = [rng.choice(("router", "shard")) for _ in moments]
    flags = (*TOY, "--state-file", str(tmp_path / "state.sqlite"))
    batch_id, lines, errors = "", list[str](), None
    while not lines:
        with start(*flags, models=("toy.gguf",)) as served:
            # A server is ready once one shard serves, and ends if another one dies in its first start.
            wait_until(partial(serving, served), "all shards serve", SHARDS.__eq__)
            if not batch_id:
                with OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
                    uploaded = client.files.create(file=requests(tmp_path / "requests.jsonl"), purpose="batch")
                    batch_id = client.batches.create(
                        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
                    ).id
            while moments:
                moment, victim = moments.pop(0), victims.pop(0)
                wait_until(
                    partial(answered, served, batch_id),
                    f"{moment} answers",
                    moment.__le__,
                    ignoring=(APIConnectionError,),
                    unless=served.log_if_ended,
                )
                if victim == "router":
                    served.process.kill()
                    served.process.wait()
                    break
                # The one before may have been the other one, and is not there again.
                os.kill(rng.choice(wait_until(served.shard_pids, "a shard runs")), signal.SIGKILL)
            else:
                wait_until(partial(answered, served, batch_id), "all answers", LINES.__eq__, unless=served.log_if_ended)
                with OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
                    batch = client.batches.retrieve(batch_id)
                    errors = batch.error_file_id
                    lines = client.files.content(batch.output_file_id or "").text.splitlines()
    assert errors is None
    answers = [json.loads(text) for text in lines]
    assert [one["custom_id"] for one in answers] == [f"r{number}" for number in range(LINES)]
    assert all(one["response"]["status_code"] == 200 for one in answers)
    tokens = [one["response"]["body"]["usage"]["completion_tokens"] for one in answers]
    assert all(0 < count <= 1 + number % 3 for number, count in enumerate(tokens))
