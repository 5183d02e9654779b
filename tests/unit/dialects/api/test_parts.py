"""One function says what the model reads of a part that is not text."""

import pytest

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.generation.parts import text_for


def test_a_part_of_a_message_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match=r"`messages\[0\].content\[1\]` must be text.*'image_url'"):
        text_for("messages[0].content[1]", "image_url")


@pytest.mark.parametrize("kind", ["image", "input_image", "document", "input_file"])
def test_a_result_of_a_tool_says_that_there_was_something(kind: str) -> None:
    assert text_for("input[2].output[0]", kind, of_tool=True).strip("[]") in kind
    with pytest.raises(ValidationError, match="must be text"):
        text_for("input[2].content[0]", kind)


def test_a_result_of_a_tool_has_no_unknown_parts() -> None:
    with pytest.raises(ValidationError, match="must be text"):
        text_for("input[2].output[0]", "hologram", of_tool=True)
