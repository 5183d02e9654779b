"""Runs in its own environment and prints as JSON what langchain-huggingface got."""

import json
import sys

from langchain_huggingface import HuggingFaceEndpoint

PROMPT = "The capital of France is"


def main(url: str) -> None:
    sampled = HuggingFaceEndpoint(endpoint_url=url, max_new_tokens=12, seed=5, huggingfacehub_api_token="none")
    greedy = HuggingFaceEndpoint(
        endpoint_url=url,
        max_new_tokens=12,
        top_k=None,
        top_p=None,
        typical_p=None,
        temperature=None,
        huggingfacehub_api_token="none",
    )
    got = {
        "text": greedy.invoke(PROMPT),
        "streamed": "".join(greedy.stream(PROMPT)),
        "stopped": greedy.invoke("One, two, three,", stop=[" six"]),
        "sampled": [sampled.invoke(PROMPT) for _ in range(2)],
    }
    print(json.dumps(got))


main(sys.argv[1])
