"""The table of errors as the README shows it."""

from caravan_router.http.server.errors import INTERNAL, TABLE, Rendering

_HEAD = """| `error_type` | status | `code` on `/v1` | status | `type` | when |
|---|---|---|---|---|---|
"""


def markdown_table() -> str:
    """A row for each way to render an error, with all that is rendered so."""
    rows: dict[Rendering, list[str]] = {}
    for kind, rendering in TABLE.items():
        assert kind.__doc__ is not None, kind
        rows.setdefault(_shown(rendering), []).append(kind.__doc__.partition("\n")[0].rstrip(".").replace("``", "`"))
    rows[_shown(INTERNAL)] = ["Something broke"]
    return _HEAD + "".join(_row(rendering, meanings) for rendering, meanings in rows.items())


def _shown(rendering: Rendering) -> Rendering:
    """What the table shows of it."""
    return Rendering(
        rendering.status,
        rendering.error_type,
        rendering.openai_status,
        rendering.openai_type,
        openai_code=rendering.openai_code or rendering.error_type,
    )


def _row(rendering: Rendering, meanings: list[str]) -> str:
    cells = (
        f"`{rendering.error_type}`",
        rendering.status,
        f"`{rendering.openai_code}`",
        rendering.openai_status,
        f"`{rendering.openai_type}`",
        ". ".join(meanings),
    )
    return f"| {' | '.join(map(str, cells))} |\n"
