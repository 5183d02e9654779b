"""Which streams of a shard may claim steps within the target of streams."""

from caravan_scheduler.shard.resident import Resident


class Claims:
    """A stream gives way to the prompts that could be computed when its own was complete.

    They came with it, and only the order of the queue put it first. It claims the target once so many more are
    complete, or fewer are left than that. One that had streamed before it was seen here claims it at once.
    """

    def __init__(self) -> None:
        self._prompts_done = 0
        # How many prompts are complete when each of the streams that were seen last claims the target.
        self._from: dict[Resident, int] = {}

    def note_prompt(self) -> None:
        """Note that a prompt is complete."""
        self._prompts_done += 1

    def any_of(self, decoding: list[Resident], prompts: int) -> bool:
        """Whether any of ``decoding`` claims the target, while ``prompts`` have yet to be computed."""
        done, known = self._prompts_done, self._from
        latest = done + prompts
        self._from = {
            resident: min(known.get(resident, done if len(resident.sequence.output) > 1 else latest), latest)
            for resident in decoding
        }
        return any(claimed <= done for claimed in self._from.values())
