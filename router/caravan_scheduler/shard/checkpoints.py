"""Where prompts pause so that their shard can save recurrent state, which others can continue from nowhere else."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Items

from caravan_scheduler.prefix_keys import BLOCK_TOKENS
from caravan_scheduler.sequence import Sequence
from caravan_scheduler.shard.resident import Resident
from caravan_scheduler.shard.saved_runs import SavedRuns

# Places closer together are one. A step takes about as long over these few tokens as over one.
_LEAST_APART = 16
# Of the messages of a prompt, the first, which many prompts have in common, and this many last ones have a checkpoint.
_LAST_MESSAGES = 4
# Keys of blocks of prompts that are remembered, to find where a prompt leaves what others had: half a million tokens.
_MOST_SEEN = 1 << 15


class Checkpoints:
    """The places where prompts of one shard pause, and the beginnings of prompts that it has had.

    Where sequences can be cut back, no prompt pauses.
    """

    def __init__(self, end_tokens: Collection[int], *, is_on: bool) -> None:
        """``end_tokens``: those that end an output, and a message within a prompt. ``is_on``: whether prompts pause."""
        self._end_tokens = end_tokens
        self._is_on = is_on
        # The places ahead of each prompt, the next one last.
        self._ahead: dict[Resident, list[int]] = {}
        # Keys of the blocks of prompts, least recently seen first.
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def chunk_end(self, resident: Resident) -> int:
        """Return where a chunk of the prompt of ``resident`` must end at the latest."""
        ahead = self._ahead.get(resident)
        return ahead[-1] if ahead else resident.target

    def ahead(self, resident: Resident) -> Items[int]:
        """Return the places where ``resident`` will pause, the last one first."""
        return self._ahead.get(resident, ())

    # Changes, which the ledger makes, and the planner when it looks at a shard

    def begin(self, resident: Resident) -> None:
        """Let the prompt of ``resident``, which starts, pause at its places."""
        if not self._is_on or resident.is_beam:
            return
        self._ahead = {one: ahead for one, ahead in self._ahead.items() if one.is_live and one.prefilling}
        sequence = resident.sequence
        found = [
            *self._message_ends(sequence.spec.prompt),
            self._fork(sequence),
            # The last two tokens are always computed together.
            sequence.known_tokens - 2,
        ]
        most = min(sequence.most_shared, resident.target - 2)
        self._ahead[resident] = list(reversed(_apart(map(sequence.border, found), resident.cached, most)))

    def pass_reached(self, runs: SavedRuns) -> list[Resident]:
        """Let the prompts go on that are at a place. Return those that are to be saved there, as ``runs`` lack it."""
        if not self._ahead:
            return []
        reached = [one for one, ahead in self._ahead.items() if one.is_running and ahead and ahead[-1] <= one.computed]
        for resident in reached:
            ahead = self._ahead[resident]
            while ahead and ahead[-1] <= resident.computed:
                ahead.pop()
        states = runs.states
        return [one for one in reached if states is not None and states.get(one.prefix_key) is None]

    def _message_ends(self, prompt: Items[int]) -> list[int]:
        """Return the lengths of the prompt up to the ends of messages, the most useful ones first."""
        ends = [place + 1 for place, token in enumerate(prompt) if token in self._end_tokens]
        return [*ends[:1], *reversed(ends[-_LAST_MESSAGES:])]

    def _fork(self, sequence: Sequence) -> int:
        """Return up to where the prompt begins as another began, in whole blocks, and remember its beginnings."""
        keys = [sequence.keys.at(end) for end in range(BLOCK_TOKENS, len(sequence.spec.prompt) + 1, BLOCK_TOKENS)]
        common = next((place for place, key in enumerate(keys) if key not in self._seen), len(keys))
        for key in keys:
            self._seen[key] = None
            self._seen.move_to_end(key)
        while len(self._seen) > _MOST_SEEN:
            self._seen.popitem(last=False)
        return common * BLOCK_TOKENS


def _apart(places: Iterable[int], start: int, most: int) -> list[int]:
    """Return ``places`` from above ``start`` to ``most`` in order. Of those close together, the first listed stays."""
    found: list[int] = []
    for place in places:
        at = bisect_right(found, place)
        near = [*found[max(0, at - 1) : at + 1], start]
        if start < place <= most and all(abs(place - other) >= _LEAST_APART for other in near):
            found.insert(at, place)
    return found


def thinned(ends: Items[int], kept: Collection[int], most: int = 0) -> list[int]:
    """Return which of the ``ends`` of checkpoints of one sequence, in ascending order, are given up.

    None as long as there are no more than ``most``, nor those in ``kept``, nor the first, nor the last few. An end
    between two others is given up if they are no farther apart than the later of them is from the last of all. So
    whoever goes back by some tokens, to a place between two that are left, has at most as many to compute again, or as
    many as lay between two checkpoints from the start. Few are left, since the distances from the last double with
    every second one.
    """
    left = list(ends)
    newest = left[-1] if left else 0
    at = 1
    while at < len(left) - _LAST_MESSAGES and len(left) > most:
        before, after = left[at - 1], left[at + 1]
        if left[at] not in kept and after - before <= newest - after:
            del left[at]
        else:
            at += 1
    return sorted(set(ends) - set(left))
