"""The formats in which models write tool calls, recognized from their chat templates."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A call is a JSON object with the keys ``name`` and ``arguments_key``.

    ``opening``: text before a call, anywhere in the output; without it, the whole output is a call or none.
    ``closing``: text after a call.
    ``listed``: ``opening`` is followed by a list of calls.
    ``bare_names``: a call may also be written as ``opening``, name, arguments.
    ``others``: further control tokens that may be inside a call.
    """

    arguments_key: str
    opening: str = ""
    closing: str = ""
    listed: bool = False
    bare_names: bool = False
    others: tuple[str, ...] = ()

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the parser must see even if they are control tokens, whose text is hidden otherwise."""
        return frozenset({*self.others, self.opening, self.closing} - {""})


# Hermes, Qwen 2.5 and Qwen 3.
HERMES = ToolFormat(arguments_key="arguments", opening="<tool_call>", closing="</tool_call>")
MISTRAL = ToolFormat(
    arguments_key="arguments", opening="[TOOL_CALLS]", listed=True, bare_names=True, others=("[ARGS]", "[CALL_ID]")
)
# Llama 3.1 and later. The tag is optional: most sizes write only the object.
LLAMA_3 = ToolFormat(arguments_key="parameters", opening="<|python_tag|>")
# gpt-oss: "to=functions.NAME" and control tokens, which `ThoughtReader` drops, precede the arguments.
HARMONY = ToolFormat(arguments_key="arguments", opening="to=functions.", bare_names=True)
GENERIC = ToolFormat(arguments_key="arguments")


def knows_tools(template: str) -> bool:
    """Whether the template shows tools to the model."""
    return "tools" in template


def tool_format_of(template: str) -> ToolFormat:
    """Return the format whose markers the template contains; GENERIC if it contains none that are known."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<|channel|>commentary" in template:
        return HARMONY
    # In templates with <function=…> the tag does not contain JSON.
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if knows_tools(template) and '"parameters"' in template and ("<|python_tag|>" in template or "ipython" in template):
        return LLAMA_3
    return GENERIC
