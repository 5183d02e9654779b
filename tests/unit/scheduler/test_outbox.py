"""What requests receive of the steps of one call."""

from caravan_scheduler.actions import Deliver
from caravan_scheduler.core.tokens import GeneratedToken, PromptToken
from caravan_scheduler.outbox import Outbox

A, B, C = (GeneratedToken(key, b"x", False, None, (), None) for key in (1, 2, 3))


def test_each_request_gets_its_token_of_a_step() -> None:
    outbox = Outbox()
    outbox.deliver_tokens([(7, A), (5, B)])
    actions = outbox.drain()
    assert actions == [Deliver(7, (), (A,)), Deliver(5, (), (B,))]
    assert all(type(action) is Deliver for action in actions)
    assert outbox.drain() == []


def test_a_request_gets_all_of_its_tokens_at_once() -> None:
    outbox = Outbox()
    outbox.deliver_tokens([(7, A), (7, B), (5, A)])
    outbox.deliver_tokens([(7, C)])
    assert outbox.drain() == [Deliver(7, (), (A, B, C)), Deliver(5, (), (A,))]


def test_prompt_logprobs_stay_before_the_first_token() -> None:
    outbox, logprobs = Outbox(), (PromptToken(None, ()),)
    outbox.deliver_prompt_logprobs(7, logprobs)
    outbox.deliver_tokens([(7, A)])
    assert outbox.drain() == [Deliver(7, logprobs, (A,))]
