"""What a recording says of one shard, on which a request waits from 1.5 s on."""

import gzip
import json
from pathlib import Path
from typing import Any


def write_recording(path: Path) -> Path:
    """Write a recording that was cut off, as when the router is killed, after it had ended."""
    lines = [json.dumps({"page": message}, separators=(",", ":")) for message in _messages()]
    path.write_bytes(
        gzip.compress("\n".join([*lines, '{"ended":"its space was full"}', '{"event":"for replays"}', ""]).encode())[
            :-10
        ]
    )
    return path


def _messages() -> list[dict[str, Any]]:
    shard = {
        "shard": "a",
        "draining": False,
        "layout": "unified",
        "sequences": 2,
        "max_sequences": 4,
        "cells": 1000,
        "used": 300,
        "cached": 100,
        "step_s": 0.02,
        "memory": [500, 1000],
        "disk": [0, 0],
        "running": [],
        "more_cells": 0,
        "map": [[-1, 200, [], []], [0, 60, [1], []], [0, 40, [2], []], [-1, 100, [], [7]]],
        "runs": [[0, 100, 500, "memory", -1, False]],
        "more_runs": 0,
    }
    waiting = {
        "request": 3,
        "reason": "prefix",
        "arrived": 101.0,
        "tokens": 812,
        "priority": 0,
        "key": "key-1",
        "of": 1,
        "shard": "",
        "saved_on": "",
        "started": False,
    }
    figures = {
        "window_s": 60,
        "tokens_s": 42.0,
        "prompt_tokens_s": 100.0,
        "ttft_s": [0.25, 1.5],
        "itl_s": [0.02, 0.03],
        "hit_rate": 0.4,
        "steps_s": 12.5,
        "requests": 2,
    }
    state = {"type": "state", "model": "m", "shards": [shard], "figures": figures}
    messages: list[dict[str, Any]] = [
        {"type": "hello", "version": 1, "at": 100.0, "unix": 0.0, "frame_s": 0.25, "state_s": 1.0}
    ]
    messages.append({**state, "at": 100.0, "queue": [], "queued": 0})
    messages.append({"type": "dropped", "count": 36})
    for number in range(12):
        at = 100.25 + number / 4
        block = {
            "shard": "a",
            "kind": "decode",
            "command": number,
            "start": at - 0.24,
            "end": at,
            "steps": 5,
            "tokens": 10,
        }
        block |= {"riders": [1, 2], "chunks": [[4, 0, 64, True]] if number == 11 else [], "drafted": 4, "accepted": 3}
        messages.append({"type": "frame", "model": "m", "at": at, "blocks": [block], "marks": []})
        if number == 5:
            messages.append({**state, "at": 101.5, "queue": [waiting], "queued": 1})
    return messages
