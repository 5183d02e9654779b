"""The formats of models whose templates do not show how calls are written: a table.

The format of any other model is derived from its template, see `tool_derivation`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from caravan_dialects.chat.tool_format import HOLE, NAME, Style, Tags, ToolFormat, is_tag


def _of_deepseek(words: str) -> str:
    """Return a control token of DeepSeek, which is written with signs of its own."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


# Hermes, Qwen 2.5 and Qwen 3, ERNIE, SmolLM 3.
HERMES = ToolFormat(opening="<tool_call>\n", closing="\n</tool_call>", between="\n")
# Qwen3-Coder, Qwen 3.5 and later, Nemotron 3.
QWEN_3_CODER = ToolFormat(
    styles=(Style.TAGS,),
    opening="<tool_call>\n<function=",
    closing="\n</function>\n</tool_call>",
    between="\n",
    name_closing=">",
    tags=Tags(key_opening="\n<parameter=", key_closing=">\n", value_closing="\n</parameter>"),
)
# Up to Mistral Small 3.1 and Nemo.
MISTRAL = ToolFormat(
    styles=(Style.OBJECT, Style.JSON),
    section_opening="[TOOL_CALLS][",
    section_closing="]",
    between=", ",
    others=("[ARGS]", "[CALL_ID]"),
)
# Llama 3.1 and later. The tag is optional: most sizes write only the object. Llama 4 also writes [f(a=1)].
LLAMA_3 = ToolFormat(
    styles=(Style.OBJECT, Style.PYTHON), also_opened=("<|python_tag|>",), arguments_key="parameters", single=True
)
# gpt-oss: control tokens, which `ThoughtReader` drops, precede the arguments.
HARMONY = ToolFormat(
    styles=(Style.JSON,),
    opening=" to=functions.",
    single=True,
    name_closing=" <|constrain|>json<|message|>",
)
# xLAM, Gemma 3 and all whose templates know no tools: the whole output is a call or a list of calls, or one stands in a
# block of code.
GENERIC = ToolFormat(
    styles=(Style.OBJECT, Style.PYTHON),
    also_opened=("```json", "```tool_code", "```tool_call", "```python", "```"),
    also_closed=("```",),
    single=True,
)
PHI_4 = ToolFormat(section_opening="<|tool_call|>[", section_closing="]<|/tool_call|>", between=", ")
# Granite 3.
GRANITE_3 = ToolFormat(section_opening="<|tool_call|>[", section_closing="]", between=", ")
LFM_2 = ToolFormat(
    styles=(Style.PYTHON, Style.OBJECT),
    section_opening="<|tool_call_start|>[",
    section_closing="]<|tool_call_end|>",
    between=", ",
)
# DeepSeek V3 and R1, whose templates show calls only in messages whose content is null.
DEEPSEEK_3 = ToolFormat(
    styles=(Style.JSON, Style.OBJECT),
    section_opening=_of_deepseek("tool calls begin"),
    section_closing=_of_deepseek("tool calls end"),
    opening=_of_deepseek("tool call begin") + "function" + _of_deepseek("tool sep"),
    closing="\n```" + _of_deepseek("tool call end"),
    between="\n",
    name_closing="\n```json\n",
)
KIMI_K2 = ToolFormat(
    styles=(Style.JSON, Style.OBJECT),
    section_opening="<|tool_calls_section_begin|>",
    section_closing="<|tool_calls_section_end|>",
    opening="<|tool_call_begin|>functions.",
    closing="<|tool_call_end|>",
    name_closing=f":{HOLE}<|tool_call_argument_begin|>",
)
# GigaChat 3, which ends its text before it names what follows. Its later templates show their calls.
GIGACHAT_3 = ToolFormat(opening="function call<|role_sep|>\n", single=True)
OLMO_3 = ToolFormat(
    styles=(Style.PYTHON,), section_opening="<function_calls>", section_closing="</function_calls>", between="\n"
)
# Functionary 3.2, whose messages, also those for the user, begin with the name of a recipient.
FUNCTIONARY_3_2 = ToolFormat(styles=(Style.JSON,), opening=">>>", name_closing="\n", prompted=True, text_name="all")
# Muse Glimmer, which names the recipient of every message.
MUSE = ToolFormat(
    styles=(Style.TAGS,),
    opening=f'to={NAME}<|message|><atem:function_calls>\n<atem:invoke name="',
    closing="</atem:invoke>\n</atem:function_calls>",
    between="<|eom|><|start|>assistant ",
    also_closed=("<|eom|>", "<|start|>assistant"),
    name_closing='">\n',
    tags=Tags(key_opening='<atem:parameter name="', key_closing='">', value_closing="</atem:parameter>\n"),
)


@dataclass(frozen=True, slots=True)
class Known:
    """``tool_format`` is that of templates which contain one text of each group in ``shown_by``.

    ``first``: it counts even if the template shows calls, because that does not show all.
    """

    tool_format: ToolFormat
    shown_by: tuple[tuple[str, ...], ...]
    first: bool = False


# The first match counts.
KNOWN: Sequence[Known] = (
    Known(HARMONY, (("<|channel|>commentary",),), first=True),
    Known(LLAMA_3, (("tools",), ('"parameters"',), ("<|python_tag|>", "ipython")), first=True),
    Known(MISTRAL, (("[TOOL_CALLS]",),)),
    Known(PHI_4, (("<|/tool_call|>",),)),
    Known(LFM_2, (("<|tool_call_start|>", "<|tool_list_start|>"),)),
    Known(DEEPSEEK_3, ((_of_deepseek("tool sep"),),)),
    Known(KIMI_K2, (("<|tool_calls_section_begin|>",),)),
    Known(GIGACHAT_3, (("function call",), ("<|role_sep|>",))),
    Known(OLMO_3, (("<function_calls>",),)),
    Known(GRANITE_3, (("<|tool_call|>", "<|start_of_role|>"), ("tools",))),
    Known(QWEN_3_CODER, (("<tool_call>",), ("<function=",), ("tools",))),
    Known(FUNCTIONARY_3_2, (("recipient==all",), (">>>",))),
    Known(MUSE, (("<atem:invoke name=",),)),
    Known(HERMES, (("<tool_call>",), ("tools",))),
)


# Characters of a word that opens calls, such as "Action:".
_WORD = 5
# Styles of calls that are recognized though nothing opens them.
_SELF_EVIDENT = (Style.OBJECT, Style.PYTHON)


def known_format_of(template: str, *, derived: ToolFormat | None = None) -> ToolFormat:
    """Return the format of a model with ``template``, which shows its calls in the format ``derived``, if it does."""
    # If nothing, or just a bracket, opens the calls that it shows, the template may ask for others.
    sure = derived is not None and any(is_tag(unit) or len(unit) >= _WORD for unit in derived.opening_units)
    for known in KNOWN:
        if (known.first or not sure) and all(any(text in template for text in group) for group in known.shown_by):
            return known.tool_format
    readable = derived is not None and (sure or derived.style in _SELF_EVIDENT)
    return derived if derived is not None and readable else GENERIC


def knows_tools(template: str) -> bool:
    """Whether the template shows tools to the model."""
    return "tools" in template
