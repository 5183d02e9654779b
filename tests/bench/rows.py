"""The rows of the comparison: which servers get which load, and which figures are taken."""

import json
from dataclasses import dataclass, replace

from bench import bounds, figures
from bench.contenders import Lineup, against_llama_server, ample_cells, for_agents, spin_counts, that_embed
from bench.figures import Figure

_CELLS = 24_576
# A quarter of the cells that eight prompts of 600 words with 64 output tokens need.
_SCARCE_CELLS = 1_280
_MAIN = against_llama_server(slots=8, cells=_CELLS)
_WIDE = against_llama_server(slots=32, cells=_CELLS)
_SCARCE = ample_cells(slots=8, scarce=_SCARCE_CELLS, ample=_CELLS)
_SPIN = spin_counts(300, 3_000, 20_000, 100_000, slots=8, cells=8_192)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One load, as arguments of ``caravan bench``; for Caravan there are ``caravan_arguments`` too.

    While it runs, ``busy`` other processes compete for the cores. It takes at most ``most_rounds`` rounds.
    """

    name: str
    title: str
    lineup: Lineup
    arguments: tuple[str, ...]
    figures: tuple[Figure, ...]
    busy: int = 0
    most_rounds: int | None = None
    caravan_arguments: tuple[str, ...] = ()


def _plain(clients: int, requests: int, lineup: Lineup) -> Row:
    return Row(
        name=f"plain-{clients}",
        title=f"plain, {clients} client{'s' if clients > 1 else ''}",
        lineup=lineup,
        arguments=("--workload", "plain", "--concurrency", str(clients), "--requests", str(requests)),
        figures=(
            figures.rate("", "output_tokens_per_s", bounds.whole(clients, 64)),
            figures.ttft(""),
            figures.ROUTER_CPU,
        ),
    )


def _decode(name: str, title: str, streams: int, lineup: Lineup, *more: str) -> Row:
    # A lone stream is fast and needs more tokens, so that its load takes some seconds.
    tokens = 384 if streams == 1 else 128
    return Row(
        name=name,
        title=title,
        lineup=lineup,
        arguments=("--workload", "decode", "--concurrency", str(streams), "--tokens", str(tokens), *more),
        figures=(figures.rate("", "steady_tokens_per_s", bounds.decoding(streams, tokens)),),
    )


def _spin(name: str, title: str, streams: int, *, busy: int) -> Row:
    # llama-batched-bench spins as OpenMP does by default, and would hardly move beside busy processes.
    row = _decode(name, title, streams, _SPIN)
    return replace(row, figures=(figures.rate("", "steady_tokens_per_s"),), busy=busy)


_SAMPLING = ("--temperature", "0.8", "--top-k", "40", "--top-p", "0.95")
_SHARED = ("--words", "600", "--tokens", "32", "--concurrency", "8", "--requests", "16")

# Rows of one lineup are next to each other, because its servers are started once for all of them.
MAIN_ROWS = (
    _plain(1, 6, _MAIN),
    _plain(8, 24, _MAIN),
    _decode("decode-1", "decode, 1 stream", 1, _MAIN),
    _decode("decode-8", "decode, 8 streams", 8, _MAIN),
    _decode("sampled-8", "decode, 8 streams, temperature, top-k, top-p", 8, _MAIN, *_SAMPLING),
    Row(
        name="prompts-8",
        title="8 prompts of 600 words, 16 tokens out",
        lineup=_MAIN,
        arguments=("--workload", "plain", "--words", "600", "--tokens", "16", "--requests", "8"),
        figures=(
            figures.rate("prompt and output ", "total_tokens_per_s", bounds.whole_with_prompt(8, 16)),
            figures.ttft(""),
        ),
    ),
    Row(
        name="n-8",
        title="`n` = 8",
        lineup=_MAIN,
        arguments=("--workload", "n", "--n", "8", "--concurrency", "1", "--requests", "3"),
        figures=(figures.rate("", "output_tokens_per_s", bounds.choices(8, 64)),),
    ),
    Row(
        name="shared-prefix",
        title="600 words in common, 8 clients",
        lineup=_MAIN,
        arguments=("--workload", "shared-prefix", *_SHARED),
        figures=(
            figures.rate(
                "new: ", "output_tokens_per_s", bounds.shared_prefix(8, 32, waves=2, tail_share=30 / 630), phase=0
            ),
            figures.ttft("new: ", phase=0),
            figures.rate("again: ", "output_tokens_per_s", phase=1),
            figures.ttft("again: ", phase=1),
        ),
    ),
    Row(
        name="stall",
        title="1,500 words land on 4 streams",
        lineup=_MAIN,
        arguments=("--workload", "stall"),
        # Caravan's OpenAI routes send a token that has no text with the next one that has, which would look like a gap.
        caravan_arguments=("--api", "generate"),
        figures=(figures.stall("worst gap", "worst_gap_s"), figures.stall("their own TTFT", "landed_ttft_s")),
    ),
    Row(
        name="returning-prefix",
        title="600 words return after other prompts",
        lineup=_MAIN,
        arguments=("--workload", "returning-prefix"),
        figures=(
            figures.ttft("returning: ", phase=2),
            figures.ttft("computed: ", phase=0),
            figures.ttft_share("returning TTFT of the computed one", phase=2, of=0),
        ),
        # One load has several prefixes, and a thousand prompts between them take minutes.
        most_rounds=1,
    ),
    _plain(32, 64, _WIDE),
    _decode("decode-32", "decode, 32 streams", 32, _WIDE),
    Row(
        name="scarce",
        title="16 requests of 600 words, 8 at once, in a quarter of the cells",
        lineup=_SCARCE,
        arguments=("--workload", "overload", "--concurrency", "8", "--requests", "16"),
        figures=(figures.rate("", "output_tokens_per_s"), figures.COMPLETED),
    ),
    _spin("spin-1", "spin count, 1 stream, quiet host", 1, busy=0),
    _spin("spin-8", "spin count, 8 streams, quiet host", 8, busy=0),
    _spin("spin-8-busy", "spin count, 8 streams beside 2 busy processes", 8, busy=2),
)


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


def _overhead_row(kind: _Kind, streams: int, lineup: Lineup, *, whole: bool) -> Row:
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


def _overhead_rows(streams: int) -> tuple[Row, ...]:
    lineup = against_llama_server(slots=streams, cells=streams * _CELLS_PER_STREAM)
    return tuple(_overhead_row(kind, streams, lineup, whole=whole) for whole in (True, False) for kind in _KINDS)


OVERHEAD_ROWS = tuple(row for streams in _TOKENS for row in _overhead_rows(streams))


_EMBEDDING = that_embed(slots=8, cells=8_192)


def _embedding_row(clients: int, requests: int) -> Row:
    size = ("--words", "100", "--concurrency", str(clients), "--requests", str(requests))
    return Row(
        name=f"embed-{clients}",
        title=f"texts of 100 words, {clients} client{'s' if clients > 1 else ''}",
        lineup=_EMBEDDING,
        arguments=("--workload", "plain", "--api", _EMBEDDING.api, *size),
        figures=(figures.rate("", "total_tokens_per_s"),),
    )


EMBEDDING_ROWS = (_embedding_row(1, 24), _embedding_row(8, 64), _embedding_row(32, 128))


# Eight agents, with cells for three of their longest sessions.
_AGENTS, _AGENTS_CELLS, _AGENTS_FIT = 8, 8_192, 3


def _agents_row(name: str, title: str, *, host_memory: bool) -> Row:
    return Row(
        name=name,
        title=title,
        # One slot more than agents, for the chat.
        lineup=for_agents(slots=_AGENTS + 1, cells=_AGENTS_CELLS, sessions=_AGENTS_FIT, host_memory=host_memory),
        arguments=("--workload", "agents", "--concurrency", str(_AGENTS)),
        figures=(
            figures.agents("mean session", "session_s", "mean"),
            figures.agents("TTFT after a tool, mean", "return_ttft_s", "mean"),
            figures.COMPUTED,
            figures.agents("chat's TTFT p99", "chat_ttft_s", "p99"),
        ),
    )


AGENT_ROWS = (
    _agents_row("agents", "8 agents and a chat, prefixes in host memory too", host_memory=True),
    _agents_row("agents-in-cells", "8 agents and a chat, prefixes in KV cells only", host_memory=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """``age_prompts`` prompts of ``age_words`` words age each server, which has ``threads`` compute threads.

    ``between`` is the number of other prompts that come before a prefix returns.
    """

    rows: tuple[Row, ...]
    models: tuple[str, ...]
    rounds: int
    age_prompts: int
    age_words: int
    between: int
    threads: int = 2


PROFILES = {
    "quick": Profile(rows=MAIN_ROWS, models=("smollm2-q4_1",), rounds=3, age_prompts=16, age_words=300, between=50),
    "full": Profile(
        rows=MAIN_ROWS,
        models=("smollm2-q4_1", "smollm2-q4_0", "gemma-3-270m"),
        rounds=5,
        age_prompts=48,
        age_words=400,
        between=1000,
    ),
    # One compute thread leaves a core to what is measured.
    "overhead": Profile(
        rows=OVERHEAD_ROWS,
        models=("tiny-49k", "tiny-152k", "tiny-262k"),
        rounds=3,
        age_prompts=64,
        age_words=100,
        between=50,
        threads=1,
    ),
    "agents": Profile(rows=AGENT_ROWS, models=("smollm2-q4_1",), rounds=3, age_prompts=16, age_words=300, between=50),
    "embeddings": Profile(
        rows=EMBEDDING_ROWS,
        models=("smollm2-q4_1", "bert-q8_0"),
        rounds=3,
        age_prompts=64,
        age_words=100,
        between=50,
    ),
}
