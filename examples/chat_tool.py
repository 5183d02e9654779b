"""A chat in which the model calls a function of this program. Usage: chat_tool.py MODEL.gguf"""

import json
import sys

from caravan import LLM, SamplingParams

PRICES = {"apple": 2, "pear": 3}
TOOL = {
    "type": "function",
    "function": {
        "name": "price",
        "description": "Look up what a fruit costs",
        "parameters": {
            "type": "object",
            "properties": {"fruit": {"enum": sorted(PRICES)}},
            "required": ["fruit"],
            "additionalProperties": False,
        },
    },
}


def main(model: str) -> None:
    """Let the model ask for a price, give it, and print its answer."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "What does a pear cost?"}]
    params = SamplingParams(temperature=0, max_tokens=48)
    with LLM(model, parallel=2, ctx_size=4096) as llm:
        (asked,) = llm.chat(messages, params, tools=[TOOL], tool_choice="required")[0].outputs
        (call,) = asked.tool_calls
        fruit = json.loads(call.arguments)["fruit"]
        print(f"call: {call.name}({fruit})")
        function = {"name": call.name, "arguments": call.arguments}
        messages.append(
            {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": function}]}
        )
        messages.append({"role": "tool", "tool_call_id": call.id, "content": f"A {fruit} costs {PRICES[fruit]} euros."})
        (answer,) = llm.chat(messages, params)
        print(f"answer: {answer.outputs[0].text}")


if __name__ == "__main__":
    main(sys.argv[1])
