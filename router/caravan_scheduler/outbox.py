"""The actions of one call of `Scheduler.handle`, collected in the order in which the shell must execute them."""

from caravan_proto.messages.results import DraftCount
from caravan_scheduler.actions import (
    Action,
    Deliver,
    Drafted,
    Fail,
    FailureReason,
    Flushed,
    Left,
    PinAnswered,
    Preempt,
    Resume,
    Start,
)
from caravan_scheduler.core.tokens import GeneratedToken, PromptToken, maker

_deliver = maker(Deliver)
# What requests and operators are told, beside deliveries; all else is for shards.
_TOLD = (Start, Resume, Preempt, Fail, Left, Flushed, PinAnswered)


class Outbox:
    """Holds what was drafted, one `Deliver` a request, and all other actions in the order in which they were added."""

    def __init__(self) -> None:
        self._drafted: list[Drafted] = []
        self._deliveries: dict[int, Deliver] = {}
        self._actions: list[Action] = []

    def deliver_prompt_logprobs(self, request_id: int, tokens: tuple[PromptToken, ...]) -> None:
        """Append to the prompt logprobs that ``request_id`` receives."""
        before = self._deliveries.get(request_id, Deliver(request_id, (), ()))
        self._deliveries[request_id] = Deliver(request_id, before.prompt_logprobs + tokens, before.tokens)

    def deliver_token(self, request_id: int, token: GeneratedToken) -> None:
        """Append to the tokens that ``request_id`` receives."""
        before = self._deliveries.get(request_id, Deliver(request_id, (), ()))
        self._deliveries[request_id] = Deliver(request_id, before.prompt_logprobs, (*before.tokens, token))

    def deliver_tokens(self, tokens: list[tuple[int, GeneratedToken]]) -> None:
        """Append the tokens of a step, each with its request's number, to those that the requests receive."""
        new = {request_id: _deliver((request_id, (), (token,))) for request_id, token in tokens}
        if len(new) == len(tokens) and new.keys().isdisjoint(self._deliveries):
            self._deliveries.update(new)
            return
        for request_id, token in tokens:
            self.deliver_token(request_id, token)

    def note_drafts(self, request_id: int, count: DraftCount) -> None:
        """Tell ``request_id`` about draft tokens, before its tokens: the last of these ends it."""
        self._drafted.append(Drafted(request_id, count))

    def add(self, action: Action) -> None:
        """Append any action but a `Deliver` or a `Drafted`."""
        self._actions.append(action)

    def take_told(self, other: "Outbox") -> None:
        """Append what requests and operators are told by ``other``, and nothing that shards are told."""
        self._drafted += other._drafted
        self._deliveries |= other._deliveries
        self._actions += [action for action in other._actions if isinstance(action, _TOLD)]

    @property
    def ended(self) -> set[int]:
        """The requests that get their end."""
        finished = {key for key, one in self._deliveries.items() if one.tokens and one.tokens[-1].finish is not None}
        return finished | {action.request_id for action in self._actions if isinstance(action, Fail)}

    @property
    def faulted(self) -> tuple[int, ...]:
        """The requests that end because of a bug."""
        fails = (action for action in self._actions if isinstance(action, Fail))
        return tuple(action.request_id for action in fails if action.reason is FailureReason.FAULT)

    def drain(self) -> list[Action]:
        """Return all actions and forget them."""
        actions = [*self._drafted, *self._deliveries.values(), *self._actions]
        self._drafted, self._deliveries, self._actions = [], {}, []
        return actions
