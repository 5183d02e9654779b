"""Fork, rewind and continue a conversation on a server. Usage: served_conversation.py http://127.0.0.1:3000"""

import sys

from caravan import Client, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=24)


def main(url: str) -> None:
    """Ask a question, continue it in two ways, then take back the last turn and ask something else."""
    with Client(url) as client:
        conversation = client.create_conversation([{"role": "system", "content": "Answer in one sentence."}])
        print(f"first: {conversation.respond('What is the capital of France?', PARAMS).text}")
        fork = conversation.fork()
        for branch, question in ((conversation, "And of Italy?"), (fork, "Which river is it on?")):
            answer = branch.respond(question, PARAMS)
            print(f"{answer.usage.cached_tokens} of {answer.usage.input_tokens} tokens were cached: {answer.text}")

        # The change is made only if no one else has changed the conversation since.
        fork = fork.refresh()
        fork = fork.rewind(turns=1, if_match=fork.head)
        for part in fork.stream("How many people live there?", PARAMS):
            print(part.text, end="")
        print()
        for branch in (conversation, fork):
            print(" | ".join(item["content"][0]["text"] for item in branch.items() if item["role"] == "user"))
            branch.delete()


if __name__ == "__main__":
    main(sys.argv[1])
