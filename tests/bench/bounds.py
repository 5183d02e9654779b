"""The speed that the bare engine allows, from times that llama-batched-bench measures, with the better attention.

A server can exceed such a bound by a little, since single measurements vary.
"""

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from bench.contenders import Common
from bench.paths import BenchError, peer


class Attention(Enum):
    """Whether the engine uses flash attention; the values are those of llama.cpp's flag."""

    FLASH = "on"
    PLAIN = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRun:
    """One run of llama-batched-bench: ``sequences`` prompts, or one that they ``share``, and their output tokens."""

    prompt_tokens: int
    output_tokens: int
    sequences: int
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTime:
    """How long the run takes for all its sequences together."""

    prefill_s: float
    decode_s: float


# The times of all runs with each attention.
Engine: TypeAlias = Mapping[Attention, Mapping[EngineRun, EngineTime]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """How often the work of a row contains the prefill and the decoding of an engine run."""

    run: EngineRun
    prefills: int = 1
    decodes: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Work that yields ``tokens`` and consists of ``parts``."""

    tokens: int
    parts: tuple[Part, ...]

    def tokens_per_s(self, engine: Engine) -> float:
        """Return the highest possible rate, given the times of all runs."""
        return max(self.tokens / self._seconds(times) for times in engine.values())

    def _seconds(self, times: Mapping[EngineRun, EngineTime]) -> float:
        return sum(
            part.prefills * times[part.run].prefill_s + part.decodes * times[part.run].decode_s for part in self.parts
        )


# The bound of a row, given the mean number of prompt tokens of its requests, which depends on the model.
BoundOf: TypeAlias = Callable[[int], Bound]


def decoding(sequences: int, output_tokens: int) -> BoundOf:
    """Decode only: the prompts do not count."""

    def bound(prompt_tokens: int) -> Bound:
        run = EngineRun(prompt_tokens=prompt_tokens, output_tokens=output_tokens, sequences=sequences)
        return Bound(tokens=sequences * output_tokens, parts=(Part(run=run, prefills=0),))

    return bound


def whole(sequences: int, output_tokens: int) -> BoundOf:
    """Prefill a full batch of prompts, then decode. The rate counts output tokens."""

    def bound(prompt_tokens: int) -> Bound:
        run = EngineRun(prompt_tokens=prompt_tokens, output_tokens=output_tokens, sequences=sequences)
        return Bound(tokens=sequences * output_tokens, parts=(Part(run=run),))

    return bound


def whole_with_prompt(sequences: int, output_tokens: int) -> BoundOf:
    """Prefill a full batch of prompts, then decode. The rate counts prompt tokens too."""

    def bound(prompt_tokens: int) -> Bound:
        run = EngineRun(prompt_tokens=prompt_tokens, output_tokens=output_tokens, sequences=sequences)
        return Bound(tokens=sequences * (prompt_tokens + output_tokens), parts=(Part(run=run),))

    return bound


def choices(n: int, output_tokens: int) -> BoundOf:
    """Prefill one prompt, then decode ``n`` choices."""

    def bound(prompt_tokens: int) -> Bound:
        run = EngineRun(prompt_tokens=prompt_tokens, output_tokens=output_tokens, sequences=n, shared=True)
        return Bound(tokens=n * output_tokens, parts=(Part(run=run),))

    return bound


def shared_prefix(sequences: int, output_tokens: int, *, waves: int, tail_share: float) -> BoundOf:
    """Prefill the prefix once, then ``waves`` times as many tails and outputs as there are ``sequences``."""

    def bound(prompt_tokens: int) -> Bound:
        tail_tokens = max(1, round(prompt_tokens * tail_share))
        prefix = EngineRun(
            prompt_tokens=prompt_tokens - tail_tokens, output_tokens=output_tokens, sequences=sequences, shared=True
        )
        tails = EngineRun(prompt_tokens=tail_tokens, output_tokens=1, sequences=sequences)
        return Bound(
            tokens=waves * sequences * output_tokens,
            parts=(Part(run=prefix, decodes=waves), Part(run=tails, prefills=waves, decodes=0)),
        )

    return bound


_TIMEOUT_S = 1200


def engine_time(common: Common, run: EngineRun, cells: int, attention: Attention) -> EngineTime:
    """Measure one run, in the split layout, which is the faster one."""
    command = [str(peer("llama-batched-bench")), "-m", str(common.model), "-c", str(cells), "-t", str(common.threads)]
    command += [
        "-npp",
        str(run.prompt_tokens),
        "-ntg",
        str(run.output_tokens),
        "-npl",
        str(run.sequences),
        "-fa",
        attention.value,
    ]
    command += ["--output-format", "jsonl", *(["-pps"] if run.shared else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            return EngineTime(prefill_s=row["t_pp"], decode_s=row["t_tg"])
    message = f"llama-batched-bench gave no result for {run}:\n{done.stderr[-1000:]}"
    raise BenchError(message)
