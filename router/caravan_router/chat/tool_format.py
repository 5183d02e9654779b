"""How a model writes tool calls, told from its chat template."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A call is a JSON object with ``name`` and ``arguments_key``.

    ``opening``: announces a call, or several in a list, anywhere in the text. Without it, a call is all the output.
    ``closing``: comes after it. ``bare_names``: also ``opening`` NAME ARGUMENTS. ``others``: control tokens inside.
    """

    arguments_key: str
    opening: str = ""
    closing: str = ""
    listed: bool = False
    bare_names: bool = False
    others: tuple[str, ...] = ()

    @property
    def markers(self) -> frozenset[str]:
        """Texts that count as text here, also where they are control tokens."""
        return frozenset({*self.others, self.opening, self.closing} - {""})


# Also Qwen 2.5 and 3.
HERMES = ToolFormat(arguments_key="arguments", opening="<tool_call>", closing="</tool_call>")
MISTRAL = ToolFormat(
    arguments_key="arguments", opening="[TOOL_CALLS]", listed=True, bare_names=True, others=("[ARGS]", "[CALL_ID]")
)
# 3.1 and later. The tag is optional there: most sizes write the object alone.
LLAMA_3 = ToolFormat(arguments_key="parameters", opening="<|python_tag|>")
GENERIC = ToolFormat(arguments_key="arguments")


def knows_tools(template: str) -> bool:
    """Whether it shows them to the model by itself."""
    return "tools" in template


def tool_format_of(template: str) -> ToolFormat:
    """By the words it teaches the model; GENERIC where it teaches none that are known."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    # Beside <function=…> the tag holds no JSON.
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if knows_tools(template) and '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return LLAMA_3
    return GENERIC
