"""Processor time of a token beside its forward pass: by hand, by hand with asyncio, and of the server's engine.

One stream on the tiny model of random weights with a vocabulary of 49,152 tokens, one compute thread. Run it with
``PYTHONPATH=tests .venv/bin/python -m bench.executor_cost``.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from caravan import LLM, AsyncExecutor, Executor, SamplingParams
from caravan_shard.backends.llama.backend import LlamaCppBackend
from caravan_testing.shard_models import WORDS_MODEL, fetched

TOKENS = 256
ROUNDS = 9
PROMPT = "The capital of France is"
WORKS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.0, seed=5),
    "temperature, top-k, top-p, min-p": SamplingParams(temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, seed=5),
    "the same with a repetition penalty": SamplingParams(
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.05, repetition_penalty=1.1, seed=5
    ),
}
OPTIONS: dict[str, Any] = {"ctx_size": 2048, "parallel": 4, "threads": 1, "flash_attn": "on", "cache_ram": 0}


class ForwardTime:
    """The processor time of all forward passes, on the threads that call them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        decode = LlamaCppBackend.decode

        def timed(backend: LlamaCppBackend, batch: Any) -> Any:
            start = time.thread_time()
            outcome = decode(backend, batch)
            self.seconds += time.thread_time() - start
            return outcome

        LlamaCppBackend.decode = timed  # type: ignore[assignment, method-assign]


def report(name: str, passes: ForwardTime, generate: Callable[[SamplingParams], None]) -> None:
    """Print the median of microseconds a token, with the lowest and the highest."""
    for work, params in WORKS.items():
        whole = replace(params, max_tokens=TOKENS, ignore_eos=True)
        costs = []
        for _ in range(ROUNDS):
            start, before = time.process_time(), passes.seconds
            generate(whole)
            costs.append(1e6 * (time.process_time() - start - passes.seconds + before) / TOKENS)
        print(f"{name}, {work}: {statistics.median(costs):.0f} ({min(costs):.0f} to {max(costs):.0f}) us", flush=True)


def by_hand(passes: ForwardTime) -> None:
    """Measure `Executor`."""
    with Executor(fetched(WORDS_MODEL), **OPTIONS) as executor:

        def generate(params: SamplingParams) -> None:
            with executor.create() as conversation:
                conversation.prompt(PROMPT)
                for _token in conversation.generate(sampler=params):
                    pass

        report("Executor", passes, generate)


async def awaited(passes: ForwardTime) -> None:
    """Measure `AsyncExecutor`."""
    loop = asyncio.get_running_loop()
    async with AsyncExecutor(fetched(WORDS_MODEL), **OPTIONS) as executor:

        async def whole(params: SamplingParams) -> None:
            async with await executor.create() as conversation:
                await conversation.prompt(PROMPT)
                async for _token in conversation.generate(sampler=params):
                    pass

        def generate(params: SamplingParams) -> None:
            asyncio.run_coroutine_threadsafe(whole(params), loop).result()

        await asyncio.to_thread(report, "AsyncExecutor", passes, generate)


def served(passes: ForwardTime) -> None:
    """Measure `LLM`, which has the server's scheduler and shard."""
    with LLM(fetched(WORDS_MODEL), kv_layout="unified", **OPTIONS) as llm:

        def generate(params: SamplingParams) -> None:
            for _part in llm.stream(PROMPT, params):
                pass

        report("LLM", passes, generate)


if __name__ == "__main__":
    time_of_passes = ForwardTime()
    by_hand(time_of_passes)
    asyncio.run(awaited(time_of_passes))
    served(time_of_passes)
