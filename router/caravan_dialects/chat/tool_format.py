"""How models write calls of tools: a description that the parser and the grammar follow, and a table.

The table has the models whose templates do not show how calls are written. The format of any other model is derived
from its template, see `tool_derivation`.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

# Stands in a delimiter for what differs from call to call, such as an id. A noncharacter, as no text should contain it.
HOLE = "\ufdd2"
# Stands in a delimiter for the name of the argument before it.
KEY = "\ufdd3"

# Stands in what opens a call for the name of its function, which follows once more.
NAME = "\ufdd5"

# Stands before a tag that is a control token: no text that a model copies from a message contains it.
CONTROL = "\ufdd4"

# What is read as a whole: a tag, also one that ends in the middle, a name in square brackets, MiniMax's M3 prefix.
_TAG = rf"{CONTROL}?(?:\]<\][a-z]+\[>\[|<[^<>{CONTROL}]*>|<[^<>{CONTROL}]*$|\[[A-Z_]+\])"
_UNIT = re.compile(rf"{_TAG}|\s+|{HOLE}|[^\s<\[\]{HOLE}{CONTROL}]+|.", re.DOTALL)
_TAG_CHARACTERS = 3
_TAG_DELIMITERS = ("key_opening", "key_closing", "kind_closing", "value_closing")
_DELIMITERS = ("section_opening", "section_closing", "opening", "closing", "between", "name_closing", "quote")
# Characters of a word that opens calls, such as "Action:".
_WORD = 5


class Style(Enum):
    """How a call is written."""

    # {"name": "f", "arguments": {"a": 1}}
    OBJECT = auto()
    # {"f": {"a": 1}}
    KEYED = auto()
    # f, a delimiter, {"a": 1}
    JSON = auto()
    # f, then every argument between delimiters: <parameter=a>1</parameter>
    TAGS = auto()
    # f(a=1)
    PYTHON = auto()
    # f{a:1}, strings between quotes of the model's own, keys without any
    BRACES = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The delimiters of arguments in the style TAGS: ``key_opening`` key ``key_closing`` value ``value_closing``.

    ``kinds``: where the text before a value tells its type, a pair for each type: the type in JSON's words, the text.
    It stands between ``key_closing`` and ``kind_closing``.
    """

    key_opening: str
    key_closing: str
    value_closing: str
    kind_closing: str = ""
    kinds: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """What surrounds calls. White space in delimiters is what a template writes; the parser does not insist on it.

    ``styles``: those that are read; the first is the one that the model was trained to write.
    ``section_opening``, ``section_closing``: texts around all calls of a turn.
    ``opening``, ``closing``: texts around each call. ``between``: text between two calls.
    ``single``: a turn has no more than one call.
    ``also_opened``, ``also_closed``: what models write around calls though their templates do not.
    ``name_key``, ``arguments_key``: keys in the style OBJECT. ``ids``: its further keys, each with the pattern of its
    values; ``ids_first``: they precede the name. ``compact``: JSON is written without spaces.
    ``name_closing``: text between a name and its arguments, in the styles JSON and TAGS.
    ``tags``: delimiters of arguments, in the style TAGS. ``quote``: delimiter of strings, in the style BRACES.
    ``prompted``: prompts end with what opens the first call. ``text_name``: what stands in place of a name before text.
    ``others``: further control tokens that may be inside a call.
    """

    styles: tuple[Style, ...] = (Style.OBJECT,)
    section_opening: str = ""
    section_closing: str = ""
    opening: str = ""
    closing: str = ""
    between: str = ""
    single: bool = False
    also_opened: tuple[str, ...] = ()
    also_closed: tuple[str, ...] = ()
    name_key: str = "name"
    arguments_key: str = "arguments"
    ids: tuple[tuple[str, str], ...] = ()
    ids_first: bool = False
    compact: bool = False
    name_closing: str = ""
    tags: Tags | None = None
    quote: str = ""
    prompted: bool = False
    text_name: str = ""
    others: tuple[str, ...] = ()

    @property
    def style(self) -> Style:
        """The style that the model was trained to write."""
        return self.styles[0]

    @property
    def unopened(self) -> bool:
        """Whether an output may begin with a call that nothing opens."""
        return not self.opening_units

    @property
    def opening_units(self) -> tuple[str, ...]:
        """The units that precede a call, in their order."""
        return (*units(self.section_opening), *units(self.opening.replace(NAME, HOLE)))

    @property
    def closing_units(self) -> tuple[str, ...]:
        """The units that may follow a call, each as often as it may."""
        return (*units(self.closing), *units(self.section_closing), *self.also_closed)

    @property
    def triggers(self) -> tuple[str, ...]:
        """Texts behind which a call may begin: the first unit, and every further tag, as models leave tags out."""
        first, *others = self.opening_units or ("",)
        # Text that a model copies opens no call where a control token has to.
        controlled = any(unit[:1] == CONTROL for unit in (first, *others))
        tags = [unit for unit in others if unit[0] == CONTROL or (is_tag(unit) and not controlled)]
        return tuple(dict.fromkeys(unit for unit in (first, *tags, *self.also_opened) if unit))

    @property
    def delimiters(self) -> tuple[str, ...]:
        """All texts around calls, names and arguments."""
        inside = () if self.tags is None else (getattr(self.tags, name) for name in _TAG_DELIMITERS)
        around = (getattr(self, name) for name in _DELIMITERS)
        return (*around, *inside, *self.also_opened, *self.also_closed, *self.others)

    @property
    def markers(self) -> frozenset[str]:
        """Texts that the parser must see even if they are control tokens, whose text is hidden otherwise."""
        found = {unit for text in self.delimiters for unit in units(text)} | {*self.delimiters}
        return frozenset({text for unit in found for text in (unit, unit.strip())} - {""})

    def with_controls(self, controls: Collection[str]) -> "ToolFormat":
        """Return the format with CONTROL before every tag that is among ``controls``."""

        def marked(text: str) -> str:
            return "".join(CONTROL + piece if piece in controls else piece for piece in pieces(text))

        tags = self.tags
        if tags is not None:
            texts: dict[str, Any] = {name: marked(getattr(tags, name)) for name in _TAG_DELIMITERS}
            tags = replace(tags, **texts)
        delimiters: dict[str, Any] = {name: marked(getattr(self, name)) for name in _DELIMITERS}
        return replace(
            self,
            **delimiters,
            also_opened=tuple(map(marked, self.also_opened)),
            also_closed=tuple(map(marked, self.also_closed)),
            others=tuple(map(marked, self.others)),
            tags=tags,
        )


def units(text: str) -> tuple[str, ...]:
    """Split a delimiter into tags and words; white space is dropped."""
    return tuple(unit for unit in _UNIT.findall(text) if not unit.isspace())


def pieces(text: str) -> list[str]:
    """Split ``text`` into tags and single characters. Joined, they are ``text``."""
    return [piece for unit in _UNIT.findall(text) for piece in ([unit] if _is_whole(unit) else [*unit])]


def is_tag(unit: str) -> bool:
    """Whether ``unit`` is so unlike ordinary text that a call may begin behind it."""
    return _is_whole(unit) and len(unit) >= _TAG_CHARACTERS


def _is_whole(unit: str) -> bool:
    return len(unit) > 1 and unit[0] in f"<[]{CONTROL}"


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
