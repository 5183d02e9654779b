"""Why tokens of a prompt are computed although a request was expected to find them in the cache."""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Reason(Enum):
    """Why tokens of a prompt are computed. The values are metric labels."""

    # No earlier prompt of the API key has them: they are behind its end, or begin another conversation.
    NEW = "new"
    # The earlier prompt that begins alike goes on with other tokens.
    DIFFERS = "differs"
    # They were kept, and made way for others or were flushed.
    EVICTED = "evicted"
    SHARD_LOST = "shard_lost"
    # They were computed, and not kept: the request failed or was cancelled, nothing is cached, or a model with
    # recurrent state was saved at no such place.
    NEVER_SAVED = "never_saved"
    # An earlier request that has not ended computes them, or waits to be computed again.
    UNDER_WAY = "under_way"
    OTHER_SHARD = "other_shard"
    # The shard has them, but computing them is faster than copying or loading.
    NOT_WORTH_COPYING = "not_worth_copying"
    # They are saved, and no saved prefix ends there: they end between two blocks of 16 tokens.
    PART_OF_BLOCK = "part_of_block"
    # The request wants their log probabilities, which nobody has kept.
    LOGPROBS = "logprobs"
    OTHER_SALT = "other_salt"
    OTHER_ADAPTER = "other_adapter"
    NEW_WEIGHTS = "new_weights"
    # The last tokens of a prompt are always computed, since the next one is drawn from what they give.
    END = "end_of_prompt"

    # Members are keys of tables, and an enumeration's own hash is that of a member's name.
    __hash__ = object.__hash__


class Part(NamedTuple):
    """``tokens`` of a prompt from ``start`` on that are computed for one reason."""

    reason: Reason
    start: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Recomputed:
    """``parts``: all of a prompt that is not cached, in order. ``common``: its first tokens that an earlier one has.

    ``is_exact``: the next token is the first that differs. Else it is at most `BLOCK_TOKENS` - 1 tokens later.
    ``was_moved``: what is cached has come from another shard.
    """

    parts: tuple[Part, ...] = ()
    common: int = 0
    is_exact: bool = True
    was_moved: bool = False

    @property
    def by_reason(self) -> dict[Reason, int]:
        """The number of tokens by reason."""
        tokens: dict[Reason, int] = {}
        for part in self.parts:
            tokens[part.reason] = tokens.get(part.reason, 0) + part.tokens
        return tokens

    @property
    def differs_at(self) -> int | None:
        """Where the prompt begins to differ from the earlier one that begins alike; None if it goes on behind one."""
        return next((part.start for part in self.parts if part.reason is Reason.DIFFERS), None)


NOTHING_RECOMPUTED = Recomputed()
