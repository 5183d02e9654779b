"""The model that says known texts, with which calls of tools of many templates are compared."""

from pathlib import Path

import pytest

from caravan_testing.shard_builders import first_chunk
from caravan_testing.shard_models import ModelDriver
from caravan_testing.speaking_model import cue, write_speaking_model

pytestmark = pytest.mark.model

CALL = '<tool_call>\n{"name": "search", "arguments": {"city": "%s", "count": 3}}\n</tool_call>'
TEXTS = (
    CALL % "Paris",
    # It differs from the first in the middle only, so that most pieces would be equal.
    CALL % "Łódź 東京 \U0001f600",
    "Let me see.\n\n" + CALL % "Bern",
    "yes",
    # A short text that is the end of another.
    "count",
)


def said(driver: ModelDriver, prompt: str) -> str:
    """Return what the model says behind ``prompt`` up to its end token."""
    driver.engine.release_all()
    tokens = driver.tokens(prompt)
    driver.prefill(first_chunk(0, tokens, max_new=200))
    driver.decode([0])
    *words, end = driver.output[0]
    assert end in driver.backend.facts.eos_token_ids
    return b"".join(driver.backend.vocabulary.piece(token).data for token in words).decode()


def test_a_word_of_the_prompt_decides_which_text_it_says(tmp_path: Path) -> None:
    path = write_speaking_model(tmp_path / "speaking.gguf", TEXTS, "{{ messages[0].content }}")
    driver = ModelDriver(path, ctx_size=4096)
    assert driver.backend.facts.chat_template == "{{ messages[0].content }}"
    for number, text in enumerate(TEXTS):
        for prompt in (f"Say {cue(number)}.", f"{cue(number)} <tool_call> {{'name': 'x'}} {'many words ' * 50}\n"):
            assert said(driver, prompt) == text
    driver.engine.close()
    assert write_speaking_model(tmp_path / "again.gguf", TEXTS, "{{ messages[0].content }}").read_bytes() == (
        path.read_bytes()
    )


def test_a_text_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is there twice"):
        write_speaking_model(tmp_path / "speaking.gguf", ["yes", "yes"], "")
