"""When to spend time on what may be worth it."""

# Most time that is saved up, in seconds.
_MOST_SAVED_S = 5.0
# Most that is left out after a failure.
_MOST_PAUSE = 7


class Pauses:
    """Leaves out more and more after each failure: what fails takes a millisecond with many sequences."""

    __slots__ = ("_left", "_length")

    def __init__(self) -> None:
        self._left = self._length = 0

    def skips(self) -> bool:
        """Whether the next one is left out."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def note(self, *, is_failure: bool) -> None:
        """Know how one ended that was not left out."""
        self._length = min(_MOST_PAUSE, 2 * self._length + 1) if is_failure else 0
        self._left = self._length


class Savings:
    """Time that may be spent: a share of all that passes."""

    __slots__ = ("_share", "seconds")

    def __init__(self, share: float, seconds: float = 0.0) -> None:
        self._share = share
        self.seconds = seconds

    def save(self, passed_s: float) -> None:
        """Save the share of what has passed."""
        self.seconds = min(_MOST_SAVED_S, self.seconds + self._share * passed_s)


class Tries:
    """Time for steps with a number of tokens whose cost is not known.

    For each number of sequences, there is ``enough_s`` at first. Later that much is saved before it is spent, since the
    model may have to read a lot before a try.
    """

    __slots__ = ("_may_spend", "_numbers", "savings")

    def __init__(self, share: float) -> None:
        self.savings = Savings(share)
        self._numbers: set[int] = set()
        self._may_spend = True

    def are_allowed(self, sequences: int, enough_s: float) -> bool:
        """Whether a step of so many sequences may be a try."""
        if sequences not in self._numbers:
            self._numbers.add(sequences)
            self.savings.seconds += enough_s
        self._may_spend = self.savings.seconds > (0.0 if self._may_spend else enough_s)
        return self._may_spend
