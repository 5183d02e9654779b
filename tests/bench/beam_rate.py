"""Compares the tokens per second of a beam search of width 4 with those of four sampled choices.

    python tests/bench/beam_rate.py http://127.0.0.1:3000 [tokens] [repetitions]

Tokens of a search are those of all its beams: its width times its steps. Requests of both kinds alternate.
"""

import json
import statistics
import sys
import time
import urllib.request
from typing import Any

_WIDTH = 4
_PROMPT = "Write a long story about a small dragon that lives near a quiet lake in the mountains."


def _seconds(url: str, tokens: int, fields: dict[str, Any]) -> float:
    body = {"prompt": _PROMPT, "n": _WIDTH, "max_tokens": tokens, "ignore_eos": True, "speculate": 0} | fields
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request) as response:
        reply = json.load(response)
    assert reply["usage"]["completion_tokens"] == _WIDTH * tokens, reply["usage"]
    return time.monotonic() - began


def main() -> None:
    """Print the rates of both kinds and their ratio."""
    url = sys.argv[1]
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 128
    repetitions = int(sys.argv[3]) if len(sys.argv) > 3 else 5
    beams, choices = [], []
    for number in range(repetitions + 1):
        spent = _seconds(url, tokens, {"use_beam_search": True})
        drawn = _seconds(url, tokens, {"seed": number})
        if number:  # the first ones warm up
            beams.append(spent)
            choices.append(drawn)
    for name, seconds in (("beams", beams), ("choices", choices)):
        rates = [_WIDTH * tokens / one for one in seconds]
        print(f"{name}: {statistics.median(rates):.1f} tokens/s (median of {repetitions}; best {max(rates):.1f})")
    print(f"beams / choices: {statistics.median(choices) / statistics.median(beams):.2f}")


if __name__ == "__main__":
    main()
