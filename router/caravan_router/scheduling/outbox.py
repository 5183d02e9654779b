"""The actions of one call of `Scheduler.handle`, collected in the order in which the shell must execute them."""

from caravan_router.core.tokens import GeneratedToken, PromptToken
from caravan_router.scheduling.actions import Action, Deliver


class Outbox:
    """Holds one `Deliver` a request, and behind these all other actions in the order in which they were added."""

    def __init__(self) -> None:
        self._deliveries: dict[int, Deliver] = {}
        self._actions: list[Action] = []

    def deliver_prompt_logprobs(self, request_id: int, tokens: tuple[PromptToken, ...]) -> None:
        """Append to the prompt logprobs that ``request_id`` receives."""
        before = self._deliveries.get(request_id, Deliver(request_id, (), ()))
        self._deliveries[request_id] = Deliver(request_id, before.prompt_logprobs + tokens, before.tokens)

    def deliver_token(self, request_id: int, token: GeneratedToken) -> None:
        """Append to the tokens that ``request_id`` receives. Keep it cheap: it runs for every token."""
        before = self._deliveries.get(request_id)
        if before is None:
            self._deliveries[request_id] = Deliver(request_id, (), (token,))
        else:
            self._deliveries[request_id] = Deliver(request_id, before.prompt_logprobs, (*before.tokens, token))

    def add(self, action: Action) -> None:
        """Append any action but a `Deliver`."""
        self._actions.append(action)

    def drain(self) -> list[Action]:
        """Return all actions and forget them."""
        actions = [*self._deliveries.values(), *self._actions]
        self._deliveries, self._actions = {}, []
        return actions
