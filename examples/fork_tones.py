"""One prompt, computed once, continued in three tones. Usage: fork_tones.py MODEL.gguf"""

import sys

from caravan import Executor

START = "Dear neighbour, your music was very loud last night. I am writing to tell you that I am"
TONES = (" very angry", " not angry at all", " a great fan of yours")


def main(model: str) -> None:
    """Print the letter in each tone, and how many tokens were computed for all of them."""
    with Executor(model, ctx_size=1024, parallel=4) as executor:
        letter = executor.create()
        letter.prompt(START)
        executor.infer()
        branches = [letter.fork() for _ in TONES]
        for branch, tone in zip(branches, TONES, strict=True):
            branch.prompt(tone)
        # One step computes the new words of all branches; they share the cells of the start.
        did = executor.infer()
        print(f"{len(did.done)} branches share {letter.held} of {sum(branch.held for branch in branches)} tokens")
        for branch in branches:
            for token in branch.generate(16):
                if token.ends:
                    break
            print(branch.text.removeprefix(START).replace("\n", " "))


if __name__ == "__main__":
    main(sys.argv[1])
