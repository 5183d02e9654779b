"""Continue a few prompts. Usage: quick_start.py MODEL.gguf"""

import sys

from caravan import LLM, SamplingParams

PROMPTS = ["The capital of France is", "The capital of Italy is", "Once upon a time"]


def main(model: str) -> None:
    """Print each prompt with its continuation."""
    with LLM(model, parallel=4, ctx_size=2048) as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12)):
            print(f"{output.prompt}|{output.outputs[0].text!r}")


if __name__ == "__main__":
    main(sys.argv[1])
