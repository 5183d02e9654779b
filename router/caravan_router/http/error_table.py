"""The table of errors in the documentation."""

from caravan_router.http.openai.errors import openai_code, openai_status, openai_type
from caravan_router.http.server.errors import INTERNAL, TABLE, ErrorKind

_HEAD = """| `error_type` | status | `code` on `/v1` | status | `type` | when |
|---|---|---|---|---|---|
"""


def markdown_table() -> str:
    """Return a row for each form on the wire, with the meanings of all errors that have this form."""
    rows: dict[str, list[str]] = {}
    for kind in (*TABLE.values(), INTERNAL):
        rows.setdefault(_wire_form(kind), []).append(kind.meaning)
    return _HEAD + "".join(f"| {form} | {'. '.join(meanings)} |\n" for form, meanings in rows.items())


def _wire_form(kind: ErrorKind) -> str:
    return (
        f"`{kind.error_type}` | {kind.status} | `{openai_code(kind)}` | {openai_status(kind)} | `{openai_type(kind)}`"
    )
