"""Runs in its own environment and prints as JSON what the command `llm` got, set up as its manual says."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = """
- model_id: caravan-completions
  model_name: any
  api_base: {url}/v1
  completion: true
- model_id: caravan
  model_name: any
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
"""
QUESTION = "Describe the sea."

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def ask(home: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "llm", *arguments]
    environment = {**os.environ, "LLM_USER_PATH": home}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    return done.stdout.removesuffix("\n") if done.returncode == 0 else f"error: {done.stderr}"


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as home:
        Path(home, "extra-openai-models.yaml").write_text(MODELS.format(url=url))
        completion = ["-m", "caravan-completions", "-o", "max_tokens", "12", "-o", "temperature", "0"]
        chat = ["-m", "caravan", "-o", "max_tokens", "24", "-o", "temperature", "0"]
        got = {
            "models": ask(home, "models"),
            "text": ask(home, *completion, "--no-stream", "The capital of France is"),
            "streamed": ask(home, *completion, "The capital of France is"),
            "chat": ask(home, *chat, "--no-stream", QUESTION),
            "chat_streamed": ask(home, *chat, QUESTION),
            "structured": ask(
                home,
                *chat,
                "-o",
                "max_tokens",
                "80",
                "--no-stream",
                "--schema",
                json.dumps(SCHEMA),
                "The weather in Rome",
            ),
            "tool": ask(home, *chat, "-T", "llm_version", "Hello"),
            "error": ask(home, *completion, "-o", "max_tokens", "100000", "x"),
        }
    print(json.dumps(got))


main(sys.argv[1])
