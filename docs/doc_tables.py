"""The tables of the documentation that the code knows. `make docs` writes each between its markers:

    <!-- table: metrics -->
    ...
    <!-- end of table -->

A contract test fails when a table in a document is not what this module makes of the code.
"""

import ast
import dataclasses
import functools
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import comparisons
import sent_fields
from reading_path import STOPS, lines_of

from caravan_dialects.api.error_table import INTERNAL, TABLE
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.errors import openai_code, openai_status
from caravan_router.config import RouterConfig
from caravan_router.http.routes import ROUTES
from caravan_router.metrics.table import BUILD_INFO, HTTP_REQUESTS, METRICS
from caravan_router.metrics.vllm import VLLM_ABSENT, VLLM_ALIASES, VLLM_HTTP_REQUESTS
from caravan_serve.serve_flags import ServeConfig
from caravan_shard.config import ShardConfig

ROOT = Path(__file__).resolve().parents[1]
SIMULATE = ROOT / "tests" / "bench" / "simulate"
_PACKAGES = (
    "caravan",
    "proto/caravan_proto",
    "models/caravan_models",
    "router/caravan_dialects",
    "router/caravan_router",
    "router/caravan_scheduler",
    "router/caravan_serve",
    "router/caravan_studio",
    "shard/caravan_shard",
)
_TABLE = re.compile(r"(<!-- table: ([a-z -]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
# A higher bound only catches slips of the keyboard; the reader has no use for it.
_LARGEST_SHOWN_BOUND = 1e5


def documents() -> list[Path]:
    """Every document, README.md first."""
    return [*sorted(ROOT.glob("*.md"), reverse=True), *sorted((ROOT / "docs").rglob("*.md"))]


def with_tables(text: str) -> str:
    """The text of a document with every table made anew."""
    return _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)


def table_names(text: str) -> list[str]:
    """The tables that a document has."""
    return [match[2] for match in _TABLE.finditer(text)]


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    # Docstrings write code as ``code``, Markdown as `code`.
    cells = ([cell.replace("|", "\\|").replace("``", "`") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def flags_table(config: type[Any]) -> str:
    """One row for each field of a configuration made with `caravan_proto.flags.flag`."""
    hints = typing.get_type_hints(config)
    rows = []
    for field in dataclasses.fields(config):
        meta = field.metadata["flag"]
        given = (*meta.aliases, f"--{field.name.replace('_', '-')}", *([meta.negation] if meta.negation else []))
        names = ", ".join(f"`{name}`" for name in given)
        rows.append((names, _values(hints[field.name], meta, field.default), meta.help))
    return _table(("flag", "values, **default**", "meaning"), rows)


def _values(hint: Any, meta: Any, default: object) -> str:
    scalars = set(typing.get_args(hint) if isinstance(hint, types.UnionType) else [hint])
    if meta.choices or bool in scalars:
        first = {True: "on", False: "off"}[default] if isinstance(default, bool) else default
        return ", ".join(_bold(f"`{value}`", value == first) for value in meta.choices or ("on", "off"))
    given = [] if default is None or default in ("", ()) else [f"**`{default}`**"]
    if not scalars & {int, float}:
        return "".join(given) or "text"
    kind = [] if int in scalars else ["number"]
    if meta.high <= _LARGEST_SHOWN_BOUND:
        kind.append(f"{meta.low:g} to {meta.high:g}")
    elif meta.low > -math.inf:
        kind.append(f"at least {meta.low:g}")
    return ", ".join([*given, " ".join(kind) or "integer"])


def metrics_table() -> str:
    """One row for each metric."""
    metrics = (*METRICS, BUILD_INFO, HTTP_REQUESTS)
    rows = ((f"`{m.name}`", ", ".join((m.kind.value, *(f"`{label}`" for label in m.labels))), m.help) for m in metrics)
    return _table(("metric", "kind, labels", "meaning"), rows)


def vllm_names_table() -> str:
    """One row for each of vLLM's metrics, those that are not exposed last."""
    exposed = {alias.name: "; ".join(filter(None, (f"`{alias.of}`", alias.note))) for alias in VLLM_ALIASES}
    exposed[VLLM_HTTP_REQUESTS.name] = f"`{HTTP_REQUESTS.name}`; `status` is a group, such as 2xx"
    absent = {name: f"absent: {why}" for name, why in VLLM_ABSENT.items()}
    return _table(("vLLM's name", "metric"), ((f"`{name}`", what) for name, what in (exposed | absent).items()))


def routes_table() -> str:
    """One row for each answer, with all of its routes, and a row before those of each dialect."""
    answers: dict[str, dict[str, list[str]]] = {}
    for route in ROUTES:
        of_dialect = answers.setdefault(route.dialect.name, {})
        of_dialect.setdefault(route.summary, []).append(f"`{route.method} {route.path}`")
    rows: list[tuple[str, str]] = []
    for dialect, by_summary in answers.items():
        rows.append((f"**{dialect}**", ""))
        rows += ((", ".join(routes), summary) for summary, routes in by_summary.items())
    return _table(("routes, by the dialect of their errors", "what they do"), rows)


def errors_table() -> str:
    """One row for each form that errors have on the wire, with the meanings of all errors of this form."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for error, kind in {**TABLE, Exception: INTERNAL}.items():
        code = _both(f"`{kind.error_type}`", f"`{openai_code(kind)}`")
        form = (code, _both(str(kind.status), str(openai_status(kind))))
        rows.setdefault(form, []).append(kind.meaning or (error.__doc__ or "").partition("\n")[0].rstrip("."))
    head = ("`error_type`, `code`", "status", "when")
    return _table(head, ((*form, ". ".join(meanings)) for form, meanings in rows.items()))


def _both(of_tgi: str, of_openai: str) -> str:
    return of_tgi if of_tgi == of_openai else f"{of_tgi}; `/v1`: {of_openai}"


def limits_table() -> str:
    """One row for each limit on a request that no flag changes."""
    limits = Limits()
    rows = (
        ("stop string, in bytes", limits.max_stop_bytes),
        ("entries of `logit_bias`", limits.max_logit_biases),
        ("schema, regular expression, grammar or list of choices, in bytes", limits.max_constraint_bytes),
        ("`tools`", limits.max_tools),
        ("`cache_salt`, in bytes", limits.max_cache_salt_bytes),
        ("texts of one request for embeddings", limits.max_embed_texts),
    )
    return _table(("limited", "at most"), ((what, f"{most:,}") for what, most in rows))


def fields_table(dialect: str) -> str:
    """What becomes of the fields that agents and client libraries send."""
    return _table(("", "fields"), sent_fields.rows(dialect))


def packages_table() -> str:
    """One row for each package, with the first paragraph of its docstring."""
    rows = []
    for package in _PACKAGES:
        docstring = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
        rows.append((f"`{package}/`", " ".join(docstring.partition("\n\n")[0].split())))
    return _table(("package", "what is there"), rows)


def decisions_list() -> str:
    """One line for each decision, with a link."""
    lines = []
    for file in sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md")):
        title = file.read_text().partition("\n")[0].removeprefix("# ")
        number, _, sentence = title.partition(". ")
        lines.append(f"- [{number}](decisions/{file.name}) {sentence}\n")
    return "".join(lines)


def reading_path_table() -> str:
    """One row for each file of the reading path, with its size as it is now."""
    rows = []
    for number, stop in enumerate(STOPS, 1):
        names = ", ".join(f"`{name}`" for name in stop.look_for)
        rows.append((str(number), f"[`{stop.path}`](../{stop.path})", f"{lines_of(stop, ROOT)}", stop.question, names))
    return _table(("", "file", "lines, about", "the question that it answers", "look for"), rows)


def comparison_table(name: str) -> str:
    """One row for each work of a comparison with llama-server that was kept."""
    return _table(comparisons.head(name), comparisons.table_rows(name))


def goodput_table() -> str:
    """One row for each trace and load that `make simulate` played, with the goodput of each policy."""
    runs = _simulations()["runs"]
    policies = list(dict.fromkeys(run["policy"] for run in runs))
    rows: dict[tuple[str, float], dict[str, float]] = {}
    offered: dict[tuple[str, float], float] = {}
    for run in runs:
        key = (run["scenario"], run["rate"])
        rows.setdefault(key, {})[run["policy"]] = run["goodput"]
        offered[key] = run["offered"]
    lines = []
    for key, goodput in rows.items():
        # Equal as far as the table shows them.
        best = max(round(value, 1) for value in goodput.values())
        cells = (_bold(f"{goodput[name]:.1f}", round(goodput[name], 1) == best) for name in policies)
        lines.append((key[0], f"{offered[key]:.1f}", *cells))
    return _table(("trace", "requests/s", *policies), lines)


def simulated_latency_table() -> str:
    """One row for each trace at the load that it shows: Caravan beside the best other policy."""
    data = _simulations()
    rows = []
    for scenario in data["scenarios"]:
        runs = [run for run in data["runs"] if run["scenario"] == scenario["name"] and run["rate"] == scenario["shown"]]
        (ours,) = (run for run in runs if run["policy"] == "Caravan")
        best = min((run for run in runs if run is not ours), key=lambda run: run["ttft_p99_s"])
        times = (f"{run[key]:.2f}" for run in (ours, best) for key in ("ttft_p50_s", "ttft_p99_s"))
        rows.append((f"{scenario['name']}, {ours['offered']:.0f}/s", *times, best["policy"]))
    return _table(("trace", "Caravan: p50", "p99", "other: p50", "p99", "policy"), rows)


def sizing_table(name: str, head: tuple[str, ...]) -> str:
    """One row for each fleet that `make simulate` played for the sizing guide."""
    sizings = json.loads((SIMULATE / "sizing.json").read_text())
    rows = [
        (
            *sizing["shown"],
            *([f"{sizing['shards']:.1f}"] if name != "host" else ()),
            f"{100 * sizing['goodput'] / sizing['offered']:.1f} %",
            f"{sizing['ttft_p50_s']:.2f}",
            f"{sizing['ttft_p99_s']:.2f}",
            f"{1e3 * sizing['itl_p50_s']:.0f}",
            f"{sizing['preemptions']:,}",
        )
        for sizing in sizings
        if sizing["table"] == name
    ]
    measured = ("good", "TTFT p50, s", "p99, s", "ITL p50, ms", "preempted")
    return _table((*head, *measured), rows)


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def _simulations() -> Any:
    return json.loads((SIMULATE / "results.json").read_text())


TABLES: dict[str, Callable[[], str]] = {
    "flags of caravan serve": lambda: flags_table(ServeConfig),
    "flags of the router": lambda: flags_table(RouterConfig),
    "flags of a shard": lambda: flags_table(ShardConfig),
    "metrics": metrics_table,
    "names of vllm": vllm_names_table,
    "errors": errors_table,
    "routes": routes_table,
    "limits": limits_table,
    **{f"fields of {name}": functools.partial(fields_table, name) for name in sent_fields.BODIES},
    "packages": packages_table,
    "decisions": decisions_list,
    "reading path": reading_path_table,
    "goodput": goodput_table,
    "simulated latency": simulated_latency_table,
    "full": lambda: comparison_table("full"),
    "one host": lambda: sizing_table("host", ("requests/s", "cells of a shard", "sequences")),
    "a day": lambda: sizing_table("day", ("fleet", "shards, mean")),
    "a mixed day": lambda: sizing_table("mixed-day", ("fleet", "shards, mean")),
}


def main() -> int:
    """Write every table; name the documents that changed."""
    for path in documents():
        text = path.read_text()
        current = with_tables(text)
        if current != text:
            path.write_text(current)
            sys.stdout.write(f"{path.relative_to(ROOT)}: tables written\n")
    comparisons.CHARTS.mkdir(exist_ok=True)
    for path, picture in comparisons.charts().items():
        path.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
