"""Routers that are killed under load: no key has got a token that its usage does not have."""

import contextlib
import json
import random
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from caravan_dialects.auth.key import digest_of
from caravan_router.accounting.audit_cli import main as audit
from caravan_testing.serve_process import Served, start
from caravan_testing.waiting import DEADLINE_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KILLS, CLIENTS, TOKENS = 8, 6, 200
KEYS = ("alice", "bob", "carol")
TOY = ("--backend", "fake", "--fake-step-ms", "2", "-np", "8", "-c", "8192")
# Of one request: what is decided in a step, or sent and not read by the client that the kill cuts off.
AHEAD = 64


class Clients:
    """Streams from a server until it is killed, and counts the tokens that arrive."""

    def __init__(self, url: str, seen: Counter[str], prompts: Counter[str]) -> None:
        self.url = url
        self.seen, self.prompts = seen, prompts
        self.lock = threading.Lock()
        self.arrived = 0
        self.threads = [threading.Thread(target=self._stream, args=(number,)) for number in range(CLIENTS)]

    def _stream(self, number: int) -> None:
        key = KEYS[number % len(KEYS)]
        with contextlib.suppress(OSError, HTTPException):
            for turn in range(1_000_000):
                body = {"inputs": f"{number} {turn}", "parameters": {"max_new_tokens": TOKENS, "details": True}}
                headers = {"Authorization": f"Bearer {key}", "X-Session-Id": f"s{number}"}
                for event in events(f"{self.url}/generate_stream", body, headers):
                    with self.lock:
                        self.arrived += 1
                        self.seen[key] += 1
                        if event["details"]:
                            self.prompts[key] += event["details"]["input_length"]


def events(url: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        for line in response:
            if line.startswith(b"data:"):
                event = json.loads(line.removeprefix(b"data:"))
                if "token" not in event:
                    raise OSError(event)
                yield event


def usage(served: Served) -> dict[str, dict[str, Any]]:
    url = f"{served.url}/v1/organization/usage/completions?group_by=api_key_id&limit=2"
    request = urllib.request.Request(url, headers={"Authorization": "Bearer op"})
    found: dict[str, Counter[str]] = {}
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
        for bucket in json.load(response)["data"]:  # two if midnight passes
            for one in bucket["results"]:
                of_key = found.setdefault(one["api_key_id"], Counter())
                of_key.update({name: count for name, count in one.items() if isinstance(count, int)})
    return {key: dict(counts) for key, counts in found.items()}


def test_usage_is_never_under_counted_though_routers_are_killed(tmp_path: Path) -> None:
    choose = random.Random(3)
    keys = tmp_path / "keys.toml"
    entries = [(name, "operator = true\n" if name == "op" else "") for name in (*KEYS, "op")]
    keys.write_text(
        "".join(f'[[keys]]\nname = "{name}"\nsha256 = "{digest_of(name).hex()}"\n{more}' for name, more in entries)
    )
    log = tmp_path / "audit.log"
    flags = (*TOY, "--api-keys-file", str(keys), "--usage-file", str(tmp_path / "usage.db"), "--audit-log", str(log))
    seen, prompts = Counter[str](), Counter[str]()
    for _ in range(KILLS):
        with start(*flags, models=("toy.gguf",)) as served:
            clients = Clients(served.url, seen, prompts)
            for thread in clients.threads:
                thread.start()
            moment = choose.randrange(50, 2_000)
            wait_until(lambda clients=clients: clients.arrived, f"{moment} tokens", moment.__le__)  # type: ignore[misc]
            served.process.kill()
            for thread in clients.threads:
                thread.join()
    with start(*flags, models=("toy.gguf",)) as served:
        counted = usage(served)
    assert counted.keys() == set(KEYS)
    for key in KEYS:
        output = counted[key]["output_tokens"]
        assert seen[key] <= output <= seen[key] + KILLS * CLIENTS // len(KEYS) * AHEAD
        assert counted[key]["input_tokens"] >= prompts[key]
    assert audit(["verify", str(log)]) == 0
