"""What the model reads of a part of a message that is not text. Every dialect asks here, and nowhere else.

No model reads pictures, sounds or files yet, so such a part is refused. Decision 39, "A prompt is tokens and spans",
says what becomes of pictures here; sounds would go the same way.
"""

from caravan_router.api.generation.rules import not_text_error

# The words of all dialects for what the result of a tool may have beside text, and what stands for it in the prompt.
_STAND_INS = {
    "image": "[image]",
    "input_image": "[image]",
    "document": "[document]",
    "input_file": "[file]",
}


def text_for(field: str, kind: str, *, of_tool: bool = False) -> str:
    """Return the text that the model reads for a part that is not text; ``kind`` is the client's word for it.

    ``of_tool``: it belongs to the result of a tool. Agents send results again with each turn, so refusing one would
    end the conversation; the model reads that there was something. Raises ValidationError otherwise.
    """
    if of_tool and kind in _STAND_INS:
        return _STAND_INS[kind]
    raise not_text_error(field, kind)
