"""The ten files of the reading path (`docs/reading.md`), their sizes, and where to look in them."""

import re
from dataclasses import dataclass
from pathlib import Path

# Sizes are rounded to this many lines, so that a small change leaves the page as it is.
_ROUNDED_TO = 50


@dataclass(frozen=True, slots=True)
class Stop:
    """A file of the path. ``look_for``: the names to find in it; whoever has read these has the answer."""

    path: str
    question: str
    look_for: tuple[str, ...] = ()


STOPS = (
    Stop(
        "router/caravan_scheduler/__init__.py",
        "Which terms are there, what lives how long, and who may change it? A page of prose: read all of it",
    ),
    Stop(
        "router/caravan_dialects/api/tgi/validation.py",
        "How does the body of `/generate` become a request that needs no further checks?",
        ("validate_generate",),
    ),
    Stop(
        "router/caravan_router/http/generation/answer.py",
        "What does a request hold while it runs, in which order is it taken, and who releases it?",
        ("answer", "_stream"),
    ),
    Stop(
        "router/caravan_router/engine/batcher.py",
        "How do requests and results reach the scheduler, and who does what it decides?",
        ("run", "_execute", "submit"),
    ),
    Stop(
        "router/caravan_scheduler/planning/planner.py",
        "What does each shard do next: who is preempted, who starts, and when is no request admitted?",
        ("plan", "_admit", "_send"),
    ),
    Stop(
        "router/caravan_scheduler/planning/step_plan.py",
        "What does one step carry, and why not more?",
        ("can_admit", "admit", "send"),
    ),
    Stop(
        "shard/caravan_shard/engine/engine.py",
        "How does a shard check a command, compute a step, and leave no trace if that fails?",
        ("prefill", "decode_step", "_run_step", "_commit"),
    ),
    Stop(
        "router/caravan_router/engine/link.py",
        "How does the router take a shard, and notice that it is lost?",
        ("run", "_session", "_watch"),
    ),
    Stop(
        "shard/caravan_shard/service/lease.py",
        "Why can two routers never command one shard, even if each believes that it holds the shard?",
        ("request", "check", "expire"),
    ),
    Stop(
        "router/caravan_scheduler/scheduler.py",
        "What becomes of a result, and of the requests of a lost shard?",
        ("handle", "_apply_step", "_lose", "_lose_cells"),
    ),
)


def lines_of(stop: Stop, root: Path) -> int:
    """Return the number of lines of a file of the path, rounded, at least `_ROUNDED_TO`.

    Raises LookupError if the file defines none of that name for an entry of ``look_for``.
    """
    text = (root / stop.path).read_text()
    for name in stop.look_for:
        if re.search(rf"^ *(async )?def {name}\(", text, re.MULTILINE) is None:
            raise LookupError(f"docs/reading_path.py: {stop.path} defines no `{name}`")
    return max(1, round(text.count("\n") / _ROUNDED_TO)) * _ROUNDED_TO
