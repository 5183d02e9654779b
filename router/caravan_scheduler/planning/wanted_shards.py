"""How many shards the load needs to meet the targets of its clients."""

import math
from dataclasses import dataclass

from caravan_scheduler.config import SchedulerConfig
from caravan_scheduler.load import DecodeCurve
from caravan_scheduler.planning.forecast import peak_cells, to_come
from caravan_scheduler.queueing import BACKLOG_S, last_that_suits, seldom_waits
from caravan_scheduler.state import SchedulerState
from caravan_scheduler.text_load import TextLoad

# So many standard deviations of the number of requests fit the sequences and cells of a fleet.
_DEVIATIONS = 4.0
# A target that an idle shard does not meet is replaced by so many times what it needs.
_LEAST_SLOWDOWN = 1.5
# However soon prompts should start, a shard has one for this part of the time.
_LEAST_RUNNING = 0.2
# Before the time of a step is known, a shard is meant to have this part of its sequences.
_FIRST_SHARE = 0.75
# A load may grow faster than one can foresee, while new shards take their time. Twice as many shards as needed are
# wanted, up to so many more, and the fewer more the larger the fleet is, down to none: many loads hardly grow together.
_RESERVE = 2.0
_WITHOUT_RESERVE = 12.0
_EVERY_S = 1.0
# What a call with texts wants at least: a part of a shard, which others of several routers share.
_LEAST_FOR_TEXTS = 1 / 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How many sequences and cells a shard has on average; infinite ``cells`` if each sequence has its own."""

    sequences: float
    cells: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A load: ``rate`` requests per second, each with so many output tokens and so many cells on average.

    ``prompt_s``: what its prompt takes of the time of a shard, in seconds, and ``prompt_s_squared`` the mean square.
    ``decodes``: in what time running requests get a token each.
    """

    rate: float
    prompt_s: float
    prompt_s_squared: float
    output_tokens: float
    cells: float
    decodes: DecodeCurve


@dataclass(frozen=True, slots=True)
class Need:
    """What a load needs of shards that are all of that ``room``.

    A shard with ``running`` requests computes a token of each and part of a prompt in every step, so that a request
    takes output tokens x seconds of a decoding step + running x seconds of a prompt. By Little's law the shard then
    serves running / that many requests per second. More running requests are more throughput for the same weights, and
    all targets bound how many may run.
    """

    room: Room
    mix: Mix
    config: SchedulerConfig

    def request_s(self, running: float) -> float:
        """Return how long a request takes where so many run: less than one is a part of the time."""
        running = max(1.0, running)
        return self.mix.output_tokens * self.mix.decodes.seconds(running) + running * self.mix.prompt_s

    def shards(self, running: float) -> float:
        """Return how many shards serve the load if so many requests run on each."""
        return self.mix.rate * self.shard_s(running)

    def shard_s(self, running: float) -> float:
        """Return what a request takes of the time of a shard on which so many run, in seconds."""
        return self.request_s(running) / running

    def most_running(self) -> float:
        """Return how many requests may run on a shard, whatever the rate: by sequences, cells and gaps of tokens."""
        most = self.room.sequences
        if self.mix.cells > 0:
            most = min(most, self.config.target_cell_share * self.room.cells / self.mix.cells)
        return max(1.0, last_that_suits(_LEAST_RUNNING, most, self._keeps_gaps))

    def least_shards(self) -> float:
        """Return how many shards the rate needs."""
        return self.shards(
            last_that_suits(
                _LEAST_RUNNING, self.most_running(), lambda running: self._has_places(running) and self._starts(running)
            )
        )

    def _keeps_gaps(self, running: float) -> bool:
        """Whether the tokens of a request follow each other as fast as they should."""
        target_s = max(self.config.target_itl_s * self.mix.output_tokens, _LEAST_SLOWDOWN * self.request_s(1.0))
        return self.request_s(running) <= target_s

    def _has_places(self, running: float) -> bool:
        """Whether requests seldom wait for a sequence or for cells: their number varies by its square root."""
        most = self.room.sequences
        if self.mix.cells > 0:
            most = min(most, self.room.cells / self.mix.cells)
        spread = _DEVIATIONS * math.sqrt(running / max(1.0, self.shards(running)))
        return running + spread <= most

    def _starts(self, running: float) -> bool:
        """Whether prompts seldom wait too long for others."""
        mix = self.mix
        if not mix.prompt_s:
            return True
        # What decodes leave of a step that is as long as it may be.
        decode_s = mix.decodes.seconds(running)
        prompt_s = mix.prompt_s / (1 - decode_s / max(self.config.target_itl_s, 2 * decode_s))
        differs = mix.prompt_s_squared / (2 * mix.prompt_s**2)
        return seldom_waits(self.config.target_ttft_s, prompt_s, differs, rate=mix.rate, servers=self.shards(running))


class WantedShards:
    """Says how many shards the load needs; remembers what room a shard has while there is none.

    ``texts``: those of a model that only embeds, whose load is theirs.
    """

    def __init__(self) -> None:
        self.texts = TextLoad()
        self._room: Room | None = None
        self._number = 0.0
        self._looked_s = -math.inf

    def number(self, state: SchedulerState, now: float) -> float:
        """Return the number, with a fraction, so that those of several routers can be added.

        It follows from what comes and what that takes, hardly from how many shards there are, so it does not swing as
        these come and go. Of bulk work it counts only that there is some. Without any request it is 0, unless so many
        came lately that more than one shard is needed. It is computed once a second at most.
        """
        if now >= self._looked_s + _EVERY_S or ((state.sequences or self.texts.calls) and not self._number):
            self._looked_s = now
            self._number = self._look(state, now)
        return self._number

    def _look(self, state: SchedulerState, now: float) -> float:
        serving = [shard.capacity for shard in state.shards.values() if not shard.drain.has_begun]
        # A model that only embeds has no cells, and its texts are no sequences.
        generating = [one for one in serving if one.cells]
        if generating:
            self._room = Room(
                sequences=sum(one.most_running for one in generating) / len(generating),
                cells=sum(math.inf if one.is_bounded_by_sequence else one.cells for one in generating)
                / len(generating),
            )
        elif serving:
            self._room = None
        if self._room is None:
            return self._of_texts(state, now)
        wanted = _with_reserve(_needed(state, now, self._room))
        if state.sequences:
            return max(wanted, 1 / self._room.sequences)
        return wanted if wanted > 1 else 0.0

    def _of_texts(self, state: SchedulerState, now: float) -> float:
        """Return the number for a model that only embeds, or of which no shard was seen yet."""
        if state.sequences:
            return 1.0
        wanted = _with_reserve(self.texts.needed(state.config, now))
        if self.texts.calls:
            return max(wanted, _LEAST_FOR_TEXTS)
        return wanted if wanted > 1 else 0.0


def _with_reserve(needed: float) -> float:
    return needed + min(needed, _RESERVE) * max(0.0, 1 - needed / _WITHOUT_RESERVE)


def _needed(state: SchedulerState, now: float, room: Room) -> float:
    """Return how many shards are needed for what runs, what waits and what is expected."""
    load, config, waiting = state.load, state.config, state.waiting.urgent
    live = [one for shard in state.shards.values() for one in shard.stays.residents.values()]
    running = len(live) - sum(shard.stays.bulk for shard in state.shards.values())
    peak = peak_cells((one.own_cells, to_come(one.sequence, state.lengths)) for one in live)
    held = peak / (config.target_cell_share * room.cells)
    decodes = load.decodes.curve
    if decodes is None:
        return max(held, (running + waiting) / (_FIRST_SHARE * room.sequences))
    token_s = load.prompt_token_s
    output_tokens = state.lengths.mean or 2 * sum(len(one.sequence.output) for one in live) / max(1, len(live))
    mix = Mix(
        rate=load.arrivals.expected(now, config.shard_start_s),
        prompt_s=token_s * load.prompt_tokens.value,
        prompt_s_squared=token_s**2 * load.prompt_tokens_squared.value,
        output_tokens=max(1.0, output_tokens),
        cells=load.prompt_cells.value + output_tokens / 2,
        decodes=decodes,
    )
    need = Need(room, mix, config)
    most = need.most_running()
    return max(need.least_shards(), held, running / most) + waiting * need.shard_s(most) / BACKLOG_S
