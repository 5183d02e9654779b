"""Says what a shard would take with its flags, without loading it: for programs as JSON, for people as a table."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from caravan_shard.config import ShardConfig
from caravan_shard.memory_need import HOST, FreeMemory, MemoryNeed, in_words
from caravan_shard.service.loading import room_for_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """``need``: None if it is unknown. ``gpu_layers``: with the output layer, of ``layers``. ``problem``: in one line.

    ``experts_on_host``: number of layers whose experts lie there. ``saved_prefixes``: most bytes of them.
    ``context_line``: see `LoadPlan`.
    """

    model: str
    need: MemoryNeed | None
    free: FreeMemory = field(default_factory=lambda: FreeMemory(host=None))
    problem: str | None = None
    gpu_layers: int = 0
    layers: int = 0
    experts_on_host: int = 0
    cells: int = 0
    sequences: int = 0
    saved_prefixes: int = 0
    context_line: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return it for programs. ``host_bytes`` and ``devices`` are null if this build of llama.cpp does not tell."""
        need = self.need
        return {
            "model": self.model,
            "host_bytes": None if need is None else need.places[HOST],
            "devices": None if need is None else {name: size for name, size in need.places.items() if name != HOST},
            "parts": None if need is None else need.by_place,
            "saved_prefixes_bytes": self.saved_prefixes,
            "free": {"host_bytes": self.free.host, "devices": dict(self.free.devices)},
            "fits": None if need is None else self.problem is None,
            "problem": self.problem,
            "chosen": {
                "gpu_layers": self.gpu_layers,
                "of_layers": self.layers,
                "experts_on_host": self.experts_on_host,
                "cells": self.cells,
                "parallel": self.sequences,
            },
        }

    def as_text(self) -> str:
        """Return it for people, with a line break at the end."""
        experts = f", the experts of {self.experts_on_host} layers on the host" if self.experts_on_host else ""
        lines = [
            self.model,
            f"{self.gpu_layers} of {self.layers} layers on GPUs{experts}",
            f"{self.cells} KV cells for up to {self.sequences} sequences",
            *([self.context_line] if self.context_line else []),
        ]
        for place, parts in (self.need.by_place if self.need is not None else {}).items():
            taken, room = sum(parts.values()), self.free.of(place)
            rest = "" if room is None else f" of {in_words(room)} that are free"
            lines += ["", f"{place}: {in_words(taken)}{rest}"]
            lines += [f"  {what.replace('_', ' '):16} {in_words(size):>10}" for what, size in sorted(parts.items())]
            if room is not None:
                lines.append(f"  {'left':16} {in_words(room - taken) if room >= taken else 'nothing':>10}")
        if self.need is None:
            lines += ["", "this build of llama.cpp does not report what a model takes"]
        lines += ["", f"saved prefixes may take {in_words(self.saved_prefixes)} of what is left on the host"]
        lines += [self.problem] if self.problem else []
        return "\n".join(lines) + "\n"


def memory_report(config: ShardConfig) -> MemoryReport:
    """Find out what ``config`` would take. Raises StartupError as a start would."""
    if config.backend == "fake":
        return MemoryReport(
            model=(*config.aliases, Path(config.model).name)[0], need=MemoryNeed(), cells=config.cells_of(0)
        )
    from caravan_shard.backends.llama.devices.devices import first_devices
    from caravan_shard.backends.llama.devices.plan import plan_load
    from caravan_shard.backends.llama.model.log import route_llama_log

    route_llama_log()
    plan = plan_load(config, first_devices(config.rpc_servers))
    found, need = plan.measured, plan.measured.need
    left = None if plan.free.host is None else max(0, plan.free.host - (need.places[HOST] if need is not None else 0))
    return MemoryReport(
        model=Path(config.model).name,
        need=need,
        free=plan.free,
        problem=plan.problem,
        gpu_layers=plan.gpu_layers,
        layers=plan.layers,
        experts_on_host=plan.experts_on_host,
        cells=found.cells,
        sequences=config.parallel,
        saved_prefixes=room_for_runs(config, left),
        context_line=plan.context_line,
    )
