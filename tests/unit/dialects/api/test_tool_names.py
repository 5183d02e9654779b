"""The names by which the model knows tools of namespaces."""

import itertools

from caravan_dialects.api.openai.chat.messages import FUNCTION_NAME
from caravan_dialects.api.openai.responses.tools import ToolName, model_name, model_names


def test_names_are_joined_if_that_is_a_name() -> None:
    assert model_names([ToolName("add"), ToolName("add", "sums")]) == {
        ToolName("add"): "add",
        ToolName("add", "sums"): "sums__add",
    }
    assert model_name(ToolName("add", "sums")) == "sums__add"


def test_no_two_names_are_the_same_in_any_order() -> None:
    tools = [
        ToolName("a__b"),
        ToolName("b", "a"),
        ToolName("c", "a__b"),
        ToolName("b__c", "a"),
        ToolName("c" * 60, "long"),
        ToolName("c" * 61, "long"),
        ToolName("à b", "x"),
        ToolName("é b", "x"),
        ToolName("", ""),
    ]
    names = model_names(tools)
    assert names[tools[0]] == "a__b"
    assert len(set(names.values())) == len(tools)
    assert all(FUNCTION_NAME.fullmatch(name) for name in names.values()), names
    for some in itertools.permutations(tools, 3):
        assert all(model_names(dict.fromkeys([*some, *tools]))[tool] == name for tool, name in names.items())


def test_a_name_with_a_digest_is_drawn_again_if_a_client_has_it_too() -> None:
    long = ToolName("c" * 70, "long")
    taken = ToolName(model_name(long))
    names = model_names([long, taken])
    assert names[taken] == taken.name
    assert names[long] != taken.name
    assert FUNCTION_NAME.fullmatch(names[long])
