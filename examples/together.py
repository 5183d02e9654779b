"""Two requests, one after the other and then together. Usage: together.py MODEL.gguf"""

import sys
from time import perf_counter

from caravan import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time"]
PARAMS = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def seconds(llm: LLM, *requests: list[str]) -> float:
    """Return how long the ``requests`` take, each a list of prompts, one after the other."""
    start = perf_counter()
    for prompts in requests:
        llm.generate(prompts, PARAMS, use_tqdm=False)
    return perf_counter() - start


def main(model: str) -> None:
    """Print both times in seconds, and how many times as long the first is."""
    # Prompts are computed anew each time, so that both ways have the same work.
    with LLM(model, parallel=2, ctx_size=1024, prefix_caching=False) as llm:
        # The first step takes longer than later ones.
        seconds(llm, PROMPTS)
        apart, together = seconds(llm, *([prompt] for prompt in PROMPTS)), seconds(llm, PROMPTS)
        print(f"one after the other: {apart:.3f} s")
        print(f"together: {together:.3f} s")
        print(f"ratio: {apart / together:.2f}")


if __name__ == "__main__":
    main(sys.argv[1])
