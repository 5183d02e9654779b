"""Calls of earlier turns are shown by every template that can show them."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from caravan_dialects.chat.template_messages import TemplateStoppedError
from caravan_dialects.chat.template_probes import CallForm, CallForms
from caravan_testing.tool_families import render_here

_CALL = "{{ c.function.name }}({{ c.function.arguments"
_SHOWN_WITH = {
    "an object": (f"{_CALL} | tojson }}}})", CallForm()),
    "an object whose items it walks": (
        "{{ c.function.name }}{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}",
        CallForm(),
    ),
    "a text": (f"{_CALL} + '' }}}})", CallForm(as_text=True)),
    "a text that it writes as it is": (f"{_CALL} }}}})", CallForm(as_text=True)),
    "either": (
        _CALL + " if c.function.arguments is string else c.function.arguments | tojson }})",
        CallForm(),
    ),
}
_EMPTY = "{% if m.tool_calls %}{% for c in m.tool_calls %}CALL{% endfor %}{% endif %}"
_NULL = "{% if m.content is none %}{% for c in m.tool_calls %}CALL{% endfor %}{% else %}{{ m.content }}{% endif %}"


def template(message: str, call: str) -> str:
    return "{% for m in messages %}" + message.replace("CALL", call) + "{% endfor %}"


@pytest.mark.parametrize("name", _SHOWN_WITH)
@pytest.mark.parametrize("null", [False, True])
async def test_the_form_is_one_in_which_the_template_shows_the_call(name: str, *, null: bool) -> None:
    call, expected = _SHOWN_WITH[name]
    form = await CallForms(render_here).of(template(_NULL if null else _EMPTY, call))
    assert form == CallForm(as_text=expected.as_text, null=null)


async def test_a_template_that_shows_no_calls_gets_the_usual_form() -> None:
    assert await CallForms(render_here).of("{{ messages[0].content }}") == CallForm()
    assert await CallForms(render_here).of("{{ messages[1].tool_calls[0].id }}") == CallForm()


async def test_messages_are_put_into_the_form() -> None:
    arguments = {"city": "Łódź"}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    question = {"role": "user", "content": ""}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    both = reply | {"content": "Well."}
    asked, bare, said = CallForm(as_text=True, null=True).of([question, reply, both])
    assert asked == question
    assert (bare["content"], said["content"]) == (None, "Well.")
    for message in (bare, said):
        text = message["tool_calls"][0]["function"]["arguments"]
        assert json.loads(text) == arguments
        assert "Łódź" in text
    assert CallForm().of([question, reply, both]) == [question, reply, both]
    assert call["function"] == {"name": "f", "arguments": arguments}


async def test_arguments_that_were_no_json_stay_as_they_are() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city'}}
    [message] = CallForm(as_text=True).of([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert message["tool_calls"] == [call]


async def test_a_template_is_examined_once_unless_it_was_stopped() -> None:
    rendered: list[str] = []

    async def stopped_once(source: str, variables: Mapping[str, Any], max_bytes: int) -> str:
        rendered.append(source)
        if len(rendered) == 1:
            raise TemplateStoppedError(1.0)
        return await render_here(source, variables, max_bytes)

    forms = CallForms(stopped_once)
    source = template(_NULL, _SHOWN_WITH["an object"][0])
    assert await forms.of(source) == CallForm()
    assert await forms.of(source) == CallForm(null=True)
    assert await forms.of(source) == CallForm(null=True)
    assert len(rendered) == 3
