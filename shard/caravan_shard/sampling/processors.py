"""Functions of a program that change the logits of its own generations, in the process of the shard.

A function cannot travel in a message: the program registers it, and the parameters of its sequences have the key.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from caravan_shard.arrays import Floats

# Takes the output tokens so far and the logits [vocabulary], which it may change, and returns logits.
Processor = Callable[[list[int], Floats], Any]


class Processors:
    """The functions of one request, which are called in their order by the thread of the shard.

    ``error``: what a function has raised. Any thread may read it, and may call `close`.
    """

    def __init__(self, functions: Sequence[Processor]) -> None:
        self._functions: tuple[Processor, ...] | None = tuple(functions)
        self.error: BaseException | None = None

    @property
    def ended(self) -> bool:
        """Whether no function is called any more: one has failed, or their owner has closed them."""
        return self._functions is None

    def apply(self, output: Sequence[int], logits: Floats) -> Floats | None:
        """Return what the functions make of ``logits`` [vocabulary] behind ``output``; None if they have ended."""
        functions = self._functions
        if functions is None:
            return None
        changed = logits.copy()
        try:
            for function in functions:
                changed = _checked(function(list(output), changed), logits)
        except BaseException as error:  # noqa: BLE001  raised where the output is awaited: the shard serves others too
            self.error = error
            self.close()
            return None
        return changed

    def close(self) -> None:
        """Let go of the functions. The sequences that have them end with their next token."""
        self._functions = None


def _checked(returned: Any, logits: Floats) -> Floats:
    """Return what a function has returned. Raises ValueError if it is no logits, or leaves no token."""
    made: Floats = np.asarray(returned, np.float32)
    if made.shape != logits.shape:
        given = "None" if returned is None else f"shape {made.shape}"
        raise ValueError(f"a logits processor must return logits of shape {logits.shape}. Given: {given}")
    if np.isnan(made).any() or np.isposinf(made).any():
        raise ValueError("a logits processor must return logits that are numbers or -inf. Given: NaN or inf")
    if np.isneginf(made.max()):
        raise ValueError("a logits processor must leave a token whose logit is not -inf. Given: -inf for all")
    return made


class ProcessorRegistry:
    """The functions by key. Use it on one thread."""

    def __init__(self) -> None:
        self._last_key = 0
        self._registered: dict[int, Processors] = {}

    @contextmanager
    def registered(self, functions: Sequence[Processor]) -> Iterator[tuple[int, Processors]]:
        """Register ``functions``, and yield their key; close them at the end."""
        processors = Processors(functions)
        self._last_key += 1
        key = self._last_key
        self._registered[key] = processors
        try:
            yield key, processors
        finally:
            del self._registered[key]
            processors.close()

    def find(self, key: int) -> Processors | None:
        """Return the functions with this key, closed ones if they are registered no more; None if they never were."""
        if not 0 < key <= self._last_key:
            return None
        found = self._registered.get(key)
        if found is None:
            found = Processors(())
            found.close()
        return found
