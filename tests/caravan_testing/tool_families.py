"""Small chat templates that write calls of tools as the templates of model families do."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import llguidance

from caravan_dialects.chat.template_messages import TemplateError
from caravan_dialects.chat.template_process import compiled
from caravan_dialects.chat.tool_parser import CallPart, Part, TextPart

Json = dict[str, Any]
Call = tuple[str, Json]

_BAR = "\uff5c"
_STEP = "\u2581"


async def render_here(source: str, variables: Mapping[str, Any], max_bytes: int) -> str:
    """Render a template in this process. Raises TemplateError."""
    try:
        return compiled(source).render(variables)
    except Exception as error:
        raise TemplateError(str(error)) from error


def joined(parts: Sequence[Part]) -> tuple[str, list[tuple[str, str]]]:
    """Return the text, and the name and arguments of each call."""
    text = ""
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case TextPart():
                text += part.text
            case CallPart(name=None):
                assert part.index == len(calls) - 1, "parts of one call must not be mixed with parts of others"
                name, arguments = calls[-1]
                calls[-1] = (name, arguments + part.arguments)
            case CallPart(name=name):
                assert name is not None
                assert part.index == len(calls)
                calls.append((name, part.arguments))
    return text, calls


@dataclass(frozen=True, slots=True)
class Family:
    """``calls``: the part of the template that writes ``m.tool_calls``.

    ``shown``: the template that the router sees, if that does not write calls; it is one of "" and what marks it.
    ``most_calls``: in one turn. ``splits``: whether text may precede a call. ``enforced``: a constraint is for what is
    written here, and not for another syntax that the model knows, too.
    """

    name: str
    calls: str
    shown: str = ""
    most_calls: int = 2
    splits: bool = True
    enforced: bool = True

    @property
    def writer(self) -> str:
        """A template that writes calls."""
        return (
            "{% if tools %}Tools: {{ tools | tojson }}{% endif %}"
            "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|end|>"
            "{% elif m.role == 'assistant' %}<|assistant|>{{ m.content }}{% if m.tool_calls %}"
            + self.calls
            + "{% endif %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )

    @property
    def template(self) -> str:
        """The template that the router sees."""
        return "{% if tools %}" + self.shown + "{{ tools | tojson }}{% endif %}" if self.shown else self.writer

    def written(self, calls: list[Call], content: str = "") -> str:
        """Return what the model writes: ``content``, then ``calls``."""
        reply: Json = {"role": "assistant", "content": content}
        reply["tool_calls"] = [
            {"id": f"abcdefgh{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for number, (name, arguments) in enumerate(calls)
        ]
        text = compiled(self.writer).render(messages=[reply], tools=None)
        return text.removeprefix("<|assistant|>").removesuffix("<|end|>")


def _each(call: str, between: str = "") -> str:
    """Write ``call`` for each call ``c`` with the arguments ``a``."""
    return (
        "{% for t in m.tool_calls %}{% set c = t.function %}{% set a = c.arguments %}"
        + (("{{ '" + between + "' if not loop.first }}") if between else "")
        + call
        + "{% endfor %}"
    )


_OBJECT = '{"name": "{{ c.name }}", "arguments": {{ a | tojson }}}'
_JSON = "{{ a | tojson }}"
_RAW = "{{ v if v is string else v | tojson }}"


def _tags(before: str, middle: str, behind: str) -> str:
    return "{% for k, v in a.items() %}" + before + "{{ k }}" + middle + _RAW + behind + "{% endfor %}"


def _deepseek(words: str) -> str:
    return f"<{_BAR}{words.replace(' ', _STEP)}{_BAR}>"


# Python's literals, and Gemma's.
_PYTHON = (
    "{%- macro py(v) -%}{%- if v is string -%}{{ '\"' + (v | replace('\\\\', '\\\\\\\\') | replace('\"', '\\\\\"')"
    " | replace('\\n', '\\\\n')) + '\"' }}{%- elif v is boolean or v is none or v is number -%}{{ v }}"
    "{%- elif v is mapping -%}{ {%- for k, w in v.items() -%}{{ py(k) }}: {{ py(w) }}{{ ', ' if not loop.last }}"
    "{%- endfor -%} }{%- else -%}[{%- for w in v -%}{{ py(w) }}{{ ', ' if not loop.last }}{%- endfor -%}]"
    "{%- endif -%}{%- endmacro -%}"
)
_PYTHON_CALL = "{{ c.name }}({% for k, v in a.items() %}{{ k }}={{ py(v) }}{{ ', ' if not loop.last }}{% endfor %})"
_GEMMA = (
    "{%- macro gm(v) -%}{%- if v is string -%}{{ '<|\"|>' + v + '<|\"|>' }}{%- elif v is boolean or v is none -%}"
    "{{ v | tojson }}{%- elif v is mapping -%}{ {%- for k, w in v | dictsort -%}{{ k }}:{{ gm(w) }}"
    "{{ ',' if not loop.last }}{%- endfor -%} }{%- elif v is iterable -%}[{%- for w in v -%}{{ gm(w) }}"
    "{{ ',' if not loop.last }}{%- endfor -%}]{%- else -%}{{ v }}{%- endif -%}{%- endmacro -%}"
)
_QWEN_CODER = (
    "<tool_call>\n<function={{ c.name }}>\n"
    + _tags("<parameter=", ">\n", "\n</parameter>\n")
    + "</function>\n</tool_call>"
)
# What precedes each tag, and values as tags within tags.
_M3 = "]<]minimax[>["
_M3_VALUES = (
    "{%- macro xml(v) -%}{%- if v is string -%}{{ v }}{%- elif v is mapping -%}{%- for k, w in v.items() -%}"
    f"{_M3}<{{{{ k }}}}>{{{{ xml(w) }}}}{_M3}</{{{{ k }}}}>"
    "{%- endfor -%}{%- elif v is iterable -%}{%- for w in v -%}"
    f"{_M3}<item>{{{{ xml(w) }}}}{_M3}</item>"
    "{%- endfor -%}{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
)
_DSML = f"<{_BAR}DSML{_BAR}"
_DSML_END = f"</{_BAR}DSML{_BAR}"

_MUSE = (
    'to={{ c.name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ c.name }}">\n'
    + _tags('<atem:parameter name="', '">', "</atem:parameter>\n")
    + "</atem:invoke>\n</atem:function_calls>"
)

FAMILIES = (
    Family("Qwen 2.5 and Hermes", "\n" + _each("<tool_call>\n" + _OBJECT + "\n</tool_call>", "\\n")),
    Family("SmolLM 3", _each("<tool_call>\n" + _OBJECT + "\n</tool_call>", "\\n"), "Answer <tool_call>"),
    Family("ERNIE", _each("\n<tool_call>\n" + _OBJECT + "\n</tool_call>\n")),
    Family("Granite 4", _each("\n<tool_call>\n" + _OBJECT + "\n</tool_call>")),
    Family("Qwen3-Coder", "\n" + _each(_QWEN_CODER, "\\n")),
    Family("Nemotron 3", _each(_QWEN_CODER + "\n")),
    Family(
        "Seed-OSS",
        _each(
            "\n<seed:tool_call>\n<function={{ c.name }}>\n"
            + _tags("<parameter=", ">", "</parameter>\n")
            + "</function>\n</seed:tool_call>"
        ),
    ),
    Family(
        "GLM 4.5",
        _each(
            "\n<tool_call>{{ c.name }}\n"
            + _tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n")
            + "</tool_call>"
        ),
    ),
    Family(
        "GLM 4.7",
        _each("<tool_call>{{ c.name }}" + _tags("<arg_key>", "</arg_key><arg_value>", "</arg_value>") + "</tool_call>"),
    ),
    Family(
        "MiniMax M2",
        "\n<minimax:tool_call>\n"
        + _each('<invoke name="{{ c.name }}">\n' + _tags('<parameter name="', '">', "</parameter>\n") + "</invoke>\n")
        + "</minimax:tool_call>",
    ),
    Family(
        "MiniMax M3",
        _M3_VALUES
        + _M3
        + "<tool_call>\n"
        + _each(
            _M3
            + '<invoke name="{{ c.name }}">{% for k, v in a.items() %}'
            + f"{_M3}<{{{{ k }}}}>{{{{ xml(v) }}}}{_M3}</{{{{ k }}}}>"
            + "{% endfor %}"
            + _M3
            + "</invoke>\n"
        )
        + _M3
        + "</tool_call>",
    ),
    Family("MiniMax M1", "\n<tool_calls>\n" + _each(_OBJECT + "\n") + "</tool_calls>"),
    Family(
        "DeepSeek V3.2",
        f"\n\n{_DSML}function_calls>\n"
        + _each(
            f'{_DSML}invoke name="{{{{ c.name }}}}">\n'
            + _tags(
                f'{_DSML}parameter name="',
                "\" string=\"{{ 'true' if v is string else 'false' }}\">",
                f"{_DSML_END}parameter>\n",
            )
            + f"{_DSML_END}invoke>\n"
        )
        + f"{_DSML_END}function_calls>",
    ),
    Family(
        "DeepSeek V3.1",
        _deepseek("tool calls begin")
        + _each(
            _deepseek("tool call begin") + "{{ c.name }}" + _deepseek("tool sep") + _JSON + _deepseek("tool call end")
        )
        + _deepseek("tool calls end"),
    ),
    Family(
        "DeepSeek R1",
        _deepseek("tool calls begin")
        + _each(
            _deepseek("tool call begin")
            + "function"
            + _deepseek("tool sep")
            + "{{ c.name }}\n```json\n"
            + _JSON
            + "\n```"
            + _deepseek("tool call end"),
            "\\n",
        )
        + _deepseek("tool calls end"),
        _deepseek("tool sep"),
    ),
    Family(
        "Kimi K2",
        "<|tool_calls_section_begin|>"
        + _each(
            "<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
            + _JSON
            + "<|tool_call_end|>"
        )
        + "<|tool_calls_section_end|>",
    ),
    Family(
        "Kimi K3",
        "<|open|>tools<|sep|>"
        + _each(
            '<|open|>call tool="{{ c.name }}" index="{{ loop.index }}"<|sep|>'
            + _tags(
                '<|open|>argument key="',
                "\" type=\"{{ 'string' if v is string else 'boolean' if v is boolean else 'number' if v is number"
                " else 'object' if v is mapping else 'array' }}\"<|sep|>",
                "<|close|>argument<|sep|>",
            )
            + "<|close|>call<|sep|>"
        )
        + "<|close|>tools<|sep|>",
    ),
    Family(
        "Gemma 4",
        _GEMMA
        + _each(
            "<|tool_call>call:{{ c.name }}{ {%- for k, v in a | dictsort -%}{{ k }}:{{ gm(v) }}"
            "{{ ',' if not loop.last }}{%- endfor -%} }<tool_call|>"
        ),
    ),
    Family(
        "Gemma 3",
        "```json\n[" + _each(_OBJECT, ", ") + "]\n```",
        "A model that is not trained for tools. ",
        enforced=False,
    ),
    Family("xLAM", "[" + _each(_OBJECT, ", ") + "]", splits=False),
    Family(
        "Llama 3",
        _each('{"name": "{{ c.name }}", "parameters": {{ a | tojson }}}'),
        'Use {"name": function, "parameters": arguments}. <|python_tag|>',
        most_calls=1,
        splits=False,
    ),
    Family(
        "Llama 4",
        _PYTHON + "[" + _each(_PYTHON_CALL, ", ") + "]",
        'Use {"name": function, "parameters": arguments}. <|python_tag|>',
        splits=False,
        enforced=False,
    ),
    Family(
        "Mistral Nemo",
        "[TOOL_CALLS]["
        + _each('{"name": "{{ c.name }}", "arguments": {{ a | tojson }}, "id": "{{ t.id }}"}', ", ")
        + "]",
    ),
    Family("Mistral Small 3.2", _each("[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ t.id }}[ARGS]" + _JSON)),
    Family("Devstral", _each("[TOOL_CALLS]{{ c.name }}[ARGS]" + _JSON)),
    Family(
        "gpt-oss",
        # What is left of the channels when the reader of thoughts has taken their marks.
        _each(" to=functions.{{ c.name }} <|constrain|>json" + _JSON),
        "<|channel|>commentary",
        most_calls=1,
    ),
    Family("LFM 2", _PYTHON + "<|tool_call_start|>[" + _each(_PYTHON_CALL, ", ") + "]<|tool_call_end|>"),
    Family(
        "LFM 2, first",
        _PYTHON + "<|tool_call_start|>[" + _each(_PYTHON_CALL, ", ") + "]<|tool_call_end|>",
        "<|tool_list_start|>",
    ),
    Family(
        "GigaChat 3",
        _each("function call<|role_sep|>\n" + _OBJECT),
        "function call<|role_sep|>",
        most_calls=1,
    ),
    Family("Olmo 3", _PYTHON + "<function_calls>" + _each(_PYTHON_CALL, "\\n") + "</function_calls>"),
    Family(
        "Command R7B",
        "<|START_ACTION|>[\n"
        + _each(
            '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.name }}", "parameters": {{ a | tojson }}}'
            "{{ ',' if not loop.last }}\n"
        )
        + "]<|END_ACTION|>",
    ),
    Family("Granite 3", "<|tool_call|>[" + _each(_OBJECT, ", ") + "]", "<|start_of_role|> <|tool_call|>"),
    Family("Nemotron Nano 2", "\n<TOOLCALL>[" + _each(_OBJECT, ", ") + "]</TOOLCALL>"),
    Family("Phi 4 mini", "<|tool_call|>[" + _each(_OBJECT, ", ") + "]<|/tool_call|>", "<|tool|><|/tool_call|>"),
    Family("Apertus", "<|tools_prefix|>[" + _each('{"{{ c.name }}": {{ a | tojson }}}', ", ") + "]<|tools_suffix|>"),
    Family("Functionary 3.1", _each("<function={{ c.name }}>" + _JSON + "</function>")),
    Family(
        "Solar",
        "<|tool_calls|>"
        + _each(
            "<|tool_call:begin|>{{ t.id }}<|tool_call:name|>{{ c.name }}<|tool_call:args|>"
            + _JSON
            + "<|tool_call:end|>"
        )
        + "<|calls|>",
    ),
    Family(
        "Muse Glimmer",
        _each(_MUSE, "<|eom|><|start|>assistant "),
        "<|start|>assistant to=self<|message|><atem:invoke name=",
    ),
    Family("Functionary 3.2", _each(">>>{{ c.name }}{{ '\\n' }}" + _JSON), "to:recipient==all >>>"),
)


_EOS = 256
FIRST_CONTROL = _EOS + 1
# Where no more bytes may follow, the grammar is not in free text.
_FEW = 64
# How often a text ends where it may.
_ENDS = 0.5
# Random letters are of these, so that what is drawn is UTF-8.
_LETTERS = frozenset(b" abcxyz019.,:;<>(){}[]|/=_-+'\"\\\n\t")


def accepts(grammar: str, text: str, controls: Sequence[str] = ()) -> bool:
    """Whether ``grammar`` accepts exactly ``text``, in which ``controls`` are tokens, from FIRST_CONTROL on."""
    matcher = _matcher(grammar, controls)
    pieces = re.split(f"({'|'.join(map(re.escape, controls))})", text) if controls else [text]
    data = [
        token
        for piece in pieces
        for token in ([FIRST_CONTROL + controls.index(piece)] if piece in controls else piece.encode())
    ]
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def compiles(grammar: str) -> bool:
    """Whether llguidance takes ``grammar``."""
    return not _matcher_of(grammar, ()).is_error()


def drawn(grammar: str, random: Random, most: int) -> str:
    """Return a random text that ``grammar`` accepts.

    After ``most`` bytes it ends what could go on for ever.
    """
    matcher = _matcher(grammar)
    data = bytearray()
    while not matcher.is_stopped():
        mask = matcher.compute_logit_bias()
        allowed = [byte for byte in range(_EOS) if mask[byte]]
        if mask[_EOS] and (not allowed or random.random() < _ENDS):
            break
        usual = [byte for byte in allowed if byte in _LETTERS] if len(allowed) > _FEW else allowed
        data.append(random.choice(usual) if len(data) < most else _last(usual, random))
        assert matcher.consume_token(data[-1])
        assert len(data) < 2 * most, bytes(data)
    return data.decode()


def _last(allowed: Sequence[int], random: Random) -> int:
    """Return the byte that brings a text to its end."""
    # The digits of some numbers must not all be the same.
    first = random.choice(allowed) if allowed[0] == ord("0") else allowed[0]
    # A backslash may follow within a string only.
    closing = b'"' if ord("\\") in allowed else b'}]"'
    return next((byte for byte in closing if byte in allowed), first)


def _matcher(grammar: str, controls: Sequence[str] = ()) -> llguidance.LLMatcher:
    matcher = _matcher_of(grammar, controls)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def _matcher_of(grammar: str, controls: Sequence[str]) -> llguidance.LLMatcher:
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(control.encode() for control in controls)]
    wrapper = llguidance.TokenizerWrapper(_Bytes(tokens))
    return llguidance.LLMatcher(llguidance.LLTokenizer(wrapper), grammar)


class _Bytes:
    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens
        self.eos_token_id = _EOS
        self.bos_token_id = None
        self.special_token_ids = [*range(_EOS, len(tokens))]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())
