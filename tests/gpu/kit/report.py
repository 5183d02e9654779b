"""The page that the kit writes: what was built, what passed, and how the rows compare with the goals."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpu.kit.stages import STAGES, Record

KINDS = ("host", "models", "tests", "device_sampling", "rows", "bound", "stall", "between")
Results: TypeAlias = Mapping[str, Mapping[str, Mapping[str, Any]]]

# At 32 streams, greedy; of the rate of a peer, or of the bare engine.
GOAL_STREAMS = 32
GOAL_DEVICE_SAMPLING, GOAL_DEFAULT, GOAL_ENGINE, GOAL_STEP_MS = 1.0, 1.3, 0.95, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """What the page tells of. ``results``: by kind and name, as the stages have kept them."""

    rehearsal: bool
    stages: Mapping[str, Record]
    results: Results


def page_text(page: Page) -> str:
    """Return the page in Markdown. What has not been measured is missing, and said to be."""
    parts = ["# Caravan on this card" if not page.rehearsal else "# Rehearsal on the CPU, with small models", ""]
    if page.rehearsal:
        parts += ["The figures say nothing but that every stage runs.", ""]
    for title, lines in (
        ("Goals", _goals(page.results)),
        ("Host", _host(page.results)),
        ("Stages", _stages(page.stages)),
        ("Models", _models(page.results)),
        ("Tests", _tests(page.results)),
        ("Draws on the device", _texts(page.results)),
        ("Streams, tokens per second", _rows(page.results)),
        ("A long prompt lands on 4 streams", _stalls(page.results)),
        ("Between two passes of 32 streams, ms a step", _between(page.results)),
    ):
        found = list(lines)
        parts += [f"## {title}", "", *(found or ["Not measured."]), ""]
    return "\n".join(parts)


def _goals(results: Results) -> Iterator[str]:
    yield from _table("model", "goal", "found", "reached")
    names = dict.fromkeys(result["model"] for kind in ("rows", "between") for result in results[kind].values())
    for name in names:
        for peer, least in (("llama-server -bs", GOAL_DEVICE_SAMPLING), ("llama-server", GOAL_DEFAULT)):
            line = _line(results, name, f"greedy-streamed-{GOAL_STREAMS}", peer)
            ratio = None if line is None or line["ratio"] is None else float(line["ratio"]["median"])
            yield _goal(name, f"{GOAL_STREAMS} streams, at least {least} of {peer}", ratio, ratio and ratio >= least)
        share = _share(results, name, GOAL_STREAMS)
        title = f"{GOAL_STREAMS} streams, at least {GOAL_ENGINE} of llama-batched-bench"
        yield _goal(name, title, share, share and share >= GOAL_ENGINE)
        spent = _spent_ms(results, name)
        title = f"router and shard: below {GOAL_STEP_MS} ms a step of {GOAL_STREAMS}"
        yield _goal(name, title, spent, spent and spent < GOAL_STEP_MS)


def _goal(name: str, goal: str, found: float | None, reached: object) -> str:
    if found is None:
        return _cells(name, goal, "-", "-")
    return _cells(name, goal, f"{found:.2f}", "yes" if reached else "no")


def _spent_ms(results: Results, name: str) -> float | None:
    """Return the time of a step beside its pass: that of the shard's thread, and the CPU time of the router."""
    step = results["between"].get(name, {}).get("greedy")
    return None if step is None else float(step["step"] - step["forward"] + step["router_cpu"])


def _host(results: Results) -> Iterator[str]:
    for result in results["host"].values():
        yield from (f"- {fact}" for fact in result["facts"])


def _stages(stages: Mapping[str, Record]) -> Iterator[str]:
    yield from _table("stage", "seconds", "runs", "end")
    for stage in STAGES:
        if (record := stages.get(stage.name)) is not None:
            yield _cells(stage.name, f"{record.seconds:.0f}", str(record.runs), record.end)
        else:
            yield _cells(stage.name, "-", "-", "not run")


def _models(results: Results) -> Iterator[str]:
    for name, result in results["models"].items():
        yield f"- {name}: {result['gigabytes']:.2f} GB, written in {result['seconds']:.0f} s"


def _tests(results: Results) -> Iterator[str]:
    for name, result in results["tests"].items():
        failed = f"{len(result['failed'])} failed: {', '.join(result['failed'])}" if result["failed"] else "none failed"
        yield f"- {name}: {result['passed']} passed, {result['skipped']} skipped, {failed}"


def _texts(results: Results) -> Iterator[str]:
    for result in results["device_sampling"].values():
        yield from ("```text", result["text"].rstrip(), "```")


def _rows(results: Results) -> Iterator[str]:
    lines = sorted(
        ((result["streams"], result["model"], line) for result in results["rows"].values() for line in result["lines"]),
        key=lambda each: (each[1], each[0]),
    )
    if lines:
        yield from _table(
            "model", "work", "Caravan", "beside", "its own", "ratio (lowest to highest)", "of the bare engine"
        )
    for streams, name, line in lines:
        share = _engine_share(results, name, streams, line)
        yield _cells(name, line["label"].rpartition(":")[0], *_compared(line), "" if share is None else f"{share:.2f}")


def _stalls(results: Results) -> Iterator[str]:
    lines = [(result["model"], line) for result in results["stall"].values() for line in result["lines"]]
    if lines:
        yield from _table("model", "figure", "Caravan", "beside", "its own", "ratio (lowest to highest)")
    for name, line in lines:
        yield _cells(name, line["label"], *_compared(line))


def _between(results: Results) -> Iterator[str]:
    columns = ("steps", "step", "forward", "sampling", "between", "router_cpu")
    if results["between"]:
        yield from _table("model", "work", *columns)
    for name, result in results["between"].items():
        for kind in ("greedy", "sampled"):
            if kind in result:
                yield _cells(name, kind, *(f"{result[kind][column]:g}" for column in columns))
    if results["between"]:
        yield ""
        yield (
            "`step` and `forward` are times on the shard; `between` is the time between the ends of two steps, less the"
            " forward pass; `router_cpu` is CPU time of the router, which sends and streams meanwhile."
        )


def _compared(line: Mapping[str, Any]) -> tuple[str, str, str, str]:
    ratio = line["ratio"]
    shown = "-" if ratio is None else f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
    return _median(line["ours"]), str(line["peer"]), _median(line["theirs"]), shown


def _median(spread: Mapping[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:,.1f}"


def _line(results: Results, name: str, row: str, peer: str) -> Mapping[str, Any] | None:
    for result in results["rows"].values():
        for line in result["lines"]:
            if result["model"] == name and line["row"] == row and line["peer"] == peer:
                return dict(line)
    return None


def _share(results: Results, name: str, streams: int) -> float | None:
    for result in results["rows"].values():
        for line in result["lines"]:
            if result["model"] == name and line["row"] == f"greedy-streamed-{streams}":
                return _engine_share(results, name, streams, line)
    return None


def _engine_share(results: Results, name: str, streams: int, line: Mapping[str, Any]) -> float | None:
    rate = results["bound"].get(name, {}).get("tokens_per_s", {}).get(str(streams))
    return None if rate is None or line["ours"] is None else line["ours"]["median"] / float(rate)


def _table(*titles: str) -> tuple[str, str]:
    return _cells(*titles), _cells(*["---"] * len(titles))


def _cells(*values: str) -> str:
    return f"| {' | '.join(_escaped(values))} |"


def _escaped(values: Iterable[str]) -> Iterator[str]:
    return (value.replace("|", "\\|") for value in values)
