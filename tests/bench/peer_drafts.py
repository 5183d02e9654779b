"""What llama-server drafts with a head, as its log says, for the tests that compare ours."""

import json
import re
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders import Common, Contender, Product
from bench.servers import log_of, serving

_SLOT_CELLS = 512
# Chunks of a prompt, so that some need several.
_BATCH = 64
# Of each token of a draft, the log has the most probable ones; then, how many tokens were there before, and how many of
# the draft are used. The sampled token, which is not computed yet, does not count.
_LINE = re.compile(
    r"seq_id (?P<slot>\d+), draft candidate +(?P<rank>\d+), pos +\d+: +(?P<token>\d+) \( *(?P<probability>[\d.]+)\)"
    r"|called impl .*, hist size = (?P<before>\d+), .* gen = (?P<count>\d+)"
)


@dataclass(frozen=True, slots=True)
class PeerAnswer:
    """The tokens of an answer, and the drafts by how many tokens were in front.

    A draft has the most probable tokens at each place, the drafted one first, with their probabilities.
    """

    tokens: list[int]
    drafts: dict[int, list[dict[int, float]]]


def peer_answers(name: str, model: Path, prompts: Sequence[Sequence[int]], new: int, *head: str) -> list[PeerAnswer]:
    """Return greedy answers of ``new`` tokens, one after another, each of a new slot. ``head``: flags.

    Raises BenchError if llama-server is not built or does not start.
    """
    peer = Contender(
        name=name,
        product=Product.LLAMA_SERVER,
        slots=len(prompts),
        cells=len(prompts) * _SLOT_CELLS,
        flags=("-v", "-b", str(_BATCH), "-ub", str(_BATCH // 2), *head),
    )
    answers = []
    with serving(peer, Common(model=model, threads=1)) as running:
        for slot, prompt in enumerate(prompts):
            body = {"prompt": list(prompt), "n_predict": new, "temperature": 0, "ignore_eos": True}
            answer = _post(f"{running.url}/completion", {**body, "return_tokens": True, "id_slot": slot})
            answers.append(PeerAnswer(answer["tokens"], {}))
    # It is complete only now: another thread writes it.
    _add_drafts(answers, log_of(peer).read_text(errors="replace"))
    return answers


def _post(url: str, body: Mapping[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def _add_drafts(answers: Sequence[PeerAnswer], log: str) -> None:
    slot, places = 0, list[dict[int, float]]()
    for line in _LINE.finditer(log):
        if line["before"]:
            answers[slot].drafts[int(line["before"]) + 1] = places[: int(line["count"])]
            places = []
            continue
        slot = int(line["slot"])
        if line["rank"] == "0":
            places.append({})
        places[-1][int(line["token"])] = float(line["probability"])
