"""Flags of the router that are for requests which do not say otherwise."""

from dataclasses import replace

import pytest

from caravan_router.config import RouterConfig


def test_variables_and_a_budget_are_limits_of_requests() -> None:
    config = RouterConfig(chat_template_kwargs='{"enable_thinking": false, "n": [1]}', reasoning_budget=7)
    assert config.limits.chat_template_kwargs == {"enable_thinking": False, "n": [1]}
    assert config.limits.reasoning_budget == 7
    assert replace(config, reasoning_budget=-1).limits.reasoning_budget is None
    assert RouterConfig().limits.chat_template_kwargs == {}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"messages": []}', '{"enable_thinking": 1}', '{"a": "%s"}' % ("x" * 70000)]
)
def test_variables_that_cannot_be_are_refused_by_the_flags_name(text: str) -> None:
    with pytest.raises(ValueError, match="--chat-template-kwargs"):
        RouterConfig(chat_template_kwargs=text)
