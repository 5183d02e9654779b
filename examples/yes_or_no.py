"""Answer questions by comparing the logits of "yes" and "no", as BoolQ is scored. Usage: yes_or_no.py MODEL.gguf"""

import sys

from caravan import Executor

# Passage, question, answer.
QUESTIONS = (
    ("Paris is the capital of France.", "Is Paris the capital of France?", True),
    ("The sun is a star.", "Is the sun a star?", True),
    ("Ice is frozen water.", "Is ice made of water?", True),
    ("Snow is white.", "Is snow black?", False),
    ("Cats cannot fly.", "Can cats fly?", False),
)
EXAMPLES = (
    "Passage: Dogs bark.\nQuestion: Do dogs bark?\nAnswer: yes\n\n"
    "Passage: Fish live in water.\nQuestion: Do fish live on trees?\nAnswer: no\n\n"
)


def main(model: str) -> None:
    """Print the answer to each question, and how many are right."""
    with Executor(model, ctx_size=2048, parallel=len(QUESTIONS) + 2) as executor:
        yes, no = (executor.tokenize(word, add_special=False)[0] for word in (" yes", " no"))
        examples = executor.create()
        examples.prompt(EXAMPLES)
        executor.infer()
        # The examples are computed once.
        nothing, *asked = [examples.fork() for _ in range(1 + len(QUESTIONS))]
        nothing.prompt("Passage: -\nQuestion: -\nAnswer:")
        for conversation, (passage, question, _) in zip(asked, QUESTIONS, strict=True):
            conversation.prompt(f"Passage: {passage}\nQuestion: {question}\nAnswer:")
        while executor.infer().waiting:
            pass
        # What the model would rather say, whatever it is asked, does not count (Zhao et al. 2021, arXiv:2102.09690).
        bias = nothing.logits()[yes] - nothing.logits()[no]
        right = 0
        for conversation, (_, question, answer) in zip(asked, QUESTIONS, strict=True):
            logits = conversation.logits()
            margin = logits[yes] - logits[no] - bias
            right += bool(margin > 0) == answer
            print(f"{question} {'yes' if margin > 0 else 'no'} ({margin:+.2f})")
        print(f"{right} of {len(QUESTIONS)} are right")


if __name__ == "__main__":
    main(sys.argv[1])
