"""The form of a check: a generator that yields what each of its rules says, in order."""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import ParamSpec

from caravan_shard.protocol.results import Refusal

P = ParamSpec("P")


def first_refusal(check: Callable[P, Iterator[Refusal | None]]) -> Callable[P, Refusal | None]:
    """Make a check return the first refusal that it yields, None if it yields none.

    The generator does not run beyond that refusal, so each rule may rely on those before it.
    """

    @wraps(check)
    def run(*args: P.args, **kwargs: P.kwargs) -> Refusal | None:
        return next((refusal for refusal in check(*args, **kwargs) if refusal is not None), None)

    return run
