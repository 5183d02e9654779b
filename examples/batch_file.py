"""Answer each line of a file. Usage: batch_file.py MODEL.gguf QUESTIONS.txt ANSWERS.jsonl"""

import json
import sys
from pathlib import Path

from caravan import LLM, SamplingParams


def main(model: str, source: str, target: str) -> None:
    """Write one JSON object for each line: the question, the answer, and the numbers of tokens."""
    questions = [line for line in Path(source).read_text("utf-8").splitlines() if line]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    with LLM(model, parallel=8, ctx_size=4096) as llm:
        answers = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=24))
    with Path(target).open("w", encoding="utf-8") as file:
        for question, answer in zip(questions, answers, strict=True):
            (output,) = answer.outputs
            row = {"question": question, "answer": output.text, "tokens": len(output.token_ids)}
            file.write(json.dumps(row | {"cached": answer.num_cached_tokens}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:4])
