"""Rows of models whose steps take a millisecond or less, as on a GPU: what remains is the server."""

import json
from dataclasses import dataclass

from bench import bounds, figures
from bench.contenders import Lineup, against_llama_server
from bench.rows import Row

_CELLS_PER_STREAM = 1024
# Output tokens by the number of streams: a load takes about a second on a CPU core.
_TOKENS = {1: 768, 8: 512, 32: 256, 64: 192}
# Longer than any output.
_LIST = {"type": "array", "items": {"type": "integer"}, "minItems": 1000}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    name: str
    title: str
    arguments: tuple[str, ...] = ()


_DRAWN = ("--temperature", "0.8", "--top-k", "40", "--top-p", "0.95", "--min-p", "0.05")
_KINDS = (
    _Kind(name="greedy", title="greedy"),
    _Kind(name="sampled", title="temperature, top-k, top-p, min-p", arguments=_DRAWN),
    _Kind(name="logprobs", title="greedy, five logprobs a token", arguments=("--logprobs", "5")),
    _Kind(name="schema", title="greedy, a JSON schema", arguments=("--json-schema", json.dumps(_LIST))),
)


def _row(kind: _Kind, streams: int, lineup: Lineup, *, whole: bool) -> Row:
    tokens = _TOKENS[streams]
    arguments = ("--workload", "decode", "--concurrency", str(streams), "--tokens", str(tokens), *kind.arguments)
    bound = bounds.decoding(streams, tokens) if kind.name == "greedy" else None
    key = "output_tokens_per_s" if whole else "steady_tokens_per_s"
    form = "whole" if whole else "streamed"
    return Row(
        name=f"{kind.name}-{form}-{streams}",
        title=f"{streams} {form}, {kind.title}",
        lineup=lineup,
        arguments=(*arguments, "--whole") if whole else arguments,
        figures=(figures.rate("", key, bound),),
    )


def _rows(streams: int) -> tuple[Row, ...]:
    lineup = against_llama_server(slots=streams, cells=streams * _CELLS_PER_STREAM)
    return tuple(_row(kind, streams, lineup, whole=whole) for whole in (True, False) for kind in _KINDS)


OVERHEAD_ROWS = tuple(row for streams in _TOKENS for row in _rows(streams))
