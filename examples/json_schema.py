"""Answers that match a JSON schema. Usage: json_schema.py MODEL.gguf"""

import json
import sys

from caravan import LLM, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "country": {"type": "string", "maxLength": 12},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe"]},
        "islands": {"type": "boolean"},
    },
    "required": ["country", "continent", "islands"],
    "additionalProperties": False,
}


def main(model: str) -> None:
    """Print one object for each country."""
    questions = [f"Describe {country} as JSON." for country in ("France", "Japan")]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    with LLM(model, parallel=2, ctx_size=2048) as llm:
        for answer in llm.chat(conversations, SamplingParams(temperature=0, max_tokens=60), schema=SCHEMA):
            print(json.dumps(json.loads(answer.outputs[0].text)))


if __name__ == "__main__":
    main(sys.argv[1])
