"""Compares `LLM.generate` with ``caravan serve`` and the bare engine: `PYTHONPATH=tests python -m bench.library_rate`.

In each round the same prompts go to both, in turn, while both models are resident; then llama-batched-bench measures
the engine. Not run by the test suite.
"""

import argparse
import time
from collections.abc import Sequence
from statistics import median

from bench.bounds import Attention, engine_time, whole
from bench.contenders import Common, Contender, Product
from bench.load import load
from bench.models import model
from bench.servers import Running, serving
from caravan import LLM, SamplingParams
from caravan_serve.bench.request import BenchRequest
from caravan_serve.bench.workloads import Shape, Workload, phases

_TOKENS = 64


def _requests(count: int, seed: int) -> Sequence[BenchRequest]:
    """Return the requests that the load generator makes of the same arguments."""
    (phase,) = phases(Workload.PLAIN, Shape(requests=count, tokens=_TOKENS, seed=seed))
    return phase.requests


def _library(llm: LLM, requests: Sequence[BenchRequest]) -> tuple[float, int]:
    """Return the output tokens per second, and the mean number of tokens of the prompts."""
    params = SamplingParams(max_tokens=_TOKENS, temperature=0, ignore_eos=True)
    started = time.perf_counter()
    outputs = llm.generate([request.prompt for request in requests], params, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return tokens / seconds, round(sum(len(output.prompt_token_ids) for output in outputs) / len(outputs))


def _served(server: Running, clients: int, count: int, seed: int) -> float:
    arguments = ("--workload", "plain", "--tokens", str(_TOKENS), "--concurrency", str(clients))
    report = load(server.url, (*arguments, "--requests", str(count)), seed=seed)
    return float(report["phases"][0]["summary"]["output_tokens_per_s"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-q4_1")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--slots", type=int, default=32, help="sequences at a time, and clients of the server")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    common, cells, slots = Common(model=model(given.model), threads=2), 24_576, given.slots
    ours = Contender(name="serve", product=Product.CARAVAN, slots=slots, cells=cells)
    with_server: list[float] = []
    of_bound: list[float] = []
    with serving(ours, common) as server, LLM(common.model, parallel=slots, ctx_size=cells, threads=2) as llm:
        for number in range(-1, given.rounds):
            requests = _requests(given.prompts, number + 1)
            if number % 2:
                rate, prompt_tokens = _library(llm, requests)
                served = _served(server, slots, given.prompts, number + 1)
            else:
                served = _served(server, slots, given.prompts, number + 1)
                rate, prompt_tokens = _library(llm, requests)
            if number < 0:
                continue  # Both have been in use from now on.
            bound = whole(slots, _TOKENS)(prompt_tokens)
            runs = {part.run for part in bound.parts}
            engine = {each: {run: engine_time(common, run, cells, each) for run in runs} for each in Attention}
            highest = bound.tokens_per_s(engine)
            with_server.append(rate / served)
            of_bound.append(rate / highest)
            print(f"library {rate:.1f} tokens/s, served {served:.1f}, engine {highest:.1f}", flush=True)
    print(
        f"{given.prompts} prompts: {median(with_server):.2f} of the server ({min(with_server):.2f} to "
        f"{max(with_server):.2f}), {median(of_bound):.2f} of the engine ({min(of_bound):.2f} to {max(of_bound):.2f})"
    )


if __name__ == "__main__":
    main()
