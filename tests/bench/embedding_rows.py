"""Rows of servers that embed texts."""

from bench import figures
from bench.contenders import that_embed
from bench.rows import Row

_LINEUP = that_embed(slots=8, cells=8_192)


def _row(clients: int, requests: int) -> Row:
    size = ("--words", "100", "--concurrency", str(clients), "--requests", str(requests))
    return Row(
        name=f"embed-{clients}",
        title=f"texts of 100 words, {clients} client{'s' if clients > 1 else ''}",
        lineup=_LINEUP,
        arguments=("--workload", "plain", "--api", _LINEUP.api, *size),
        figures=(figures.rate("", "total_tokens_per_s"),),
    )


EMBEDDING_ROWS = (_row(1, 24), _row(8, 64), _row(32, 128))
