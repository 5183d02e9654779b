"""Prompt logprobs that were computed, kept for other prompts that begin with the same tokens."""

from caravan_scheduler.core.tokens import common_length
from caravan_scheduler.sequence import Sequence

# Most logprobs that are kept, alternatives included. Each takes about 200 bytes.
_MOST_LOGPROBS = 1 << 18


class KnownLogprobs:
    """Sequences with prompt logprobs, least recently used first.

    The logprob of a token depends on the model and the tokens before it alone, so it serves whichever shard computes
    the rest. ``most``: how many logprobs are kept.
    """

    def __init__(self, most: int = _MOST_LOGPROBS) -> None:
        self._most = most
        self._sizes: dict[Sequence, int] = {}
        # The last sequence with each prefix, by the prefix's hash and the number of alternatives.
        self._by_prefix: dict[tuple[int, int], Sequence] = {}
        self.size = 0

    def note(self, sequence: Sequence) -> None:
        """Keep the logprobs that ``sequence`` has by now, and let go those that were used least recently."""
        self._forget(sequence)
        self._sizes[sequence] = len(sequence.prompt_logprobs) * (1 + sequence.spec.sampling.top_n_tokens)
        self.size += self._sizes[sequence]
        for key in _keys(sequence, len(sequence.prompt_logprobs)):
            self._by_prefix[key] = sequence
        while self.size > self._most:
            self._forget(next(iter(self._sizes)))

    def share_with(self, sequence: Sequence) -> None:
        """Give ``sequence``, which waits, the logprobs of its first tokens that another sequence has.

        The last one is always computed, and all are delivered with it.
        """
        prompt = sequence.spec.prompt
        for key in reversed(_keys(sequence, len(prompt))):
            other = self._by_prefix.get(key)
            if other is None:
                continue
            self._sizes[other] = self._sizes.pop(other)
            count = common_length(other.spec.prompt[: len(other.prompt_logprobs)], prompt[:-1])
            if count > len(sequence.prompt_logprobs):
                sequence.add_prompt_logprobs(0, other.prompt_logprobs[:count])
                sequence.matches.clear()
            return

    def clear(self) -> None:
        """Forget all: the model may be another one."""
        self._sizes, self._by_prefix, self.size = {}, {}, 0

    def _forget(self, sequence: Sequence) -> None:
        self.size -= self._sizes.pop(sequence, 0)
        for key in _keys(sequence, len(sequence.prompt_logprobs)):
            if self._by_prefix.get(key) is sequence:
                del self._by_prefix[key]


def _keys(sequence: Sequence, length: int) -> list[tuple[int, int]]:
    return [(key, sequence.spec.sampling.top_n_tokens) for key in sequence.prefix_hashes(length)]
