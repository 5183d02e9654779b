"""Runs in its own environment: lm-evaluation-harness scores a task of a local file, with a tokenizer of a local folder.

Prints as JSON the accuracy, and the log probability of each choice of each question.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

# Nothing is downloaded.
os.environ |= {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}

import lm_eval
from lm_eval.tasks import TaskManager

# The harness puts a space before each choice.
QUESTIONS = [
    {
        "context": "Question: What is the capital of France?\nAnswer:",
        "choices": ["Paris", "Rome", "a dog"],
        "answer": 0,
    },
    {"context": "Question: How many legs has a dog?\nAnswer:", "choices": ["blue", "four"], "answer": 1},
    {"context": "The sun rises in the east and sets in the", "choices": ["west", "kitchen", "17"], "answer": 0},
    {"context": "One, two, three, four,", "choices": ["banana", "five"], "answer": 1},
]
TASK = """
task: local_choices
dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


def main(url: str, tokenizer: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_HOME"] = folder
        file = Path(folder) / "questions.jsonl"
        file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
        (Path(folder) / "local_choices.yaml").write_text(TASK.format(file=file))
        results = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={
                "model": "any",
                "base_url": f"{url}/v1/completions",
                "tokenizer": tokenizer,
                "tokenizer_backend": "huggingface",
                "max_retries": 1,
            },
            tasks=["local_choices"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            batch_size=8,
            bootstrap_iters=0,
        )
    samples = sorted(results["samples"]["local_choices"], key=lambda sample: sample["doc_id"])
    got = {
        "accuracy": results["results"]["local_choices"]["acc,none"],
        "logprobs": [[float(response[0][0]) for response in sample["resps"]] for sample in samples],
    }
    print(json.dumps(got))


main(*sys.argv[1:])
