"""Which of several engines of one name serves, and what moves from one that is replaced. See decision 44.

Shards with other weights under the same name join beside the old ones during a rollout, so that a name may have several
engines for some time.
"""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.generation import GenerationSpec

# All that gives the tokens of a prompt and an output their meaning.
_MEANING = (
    "vocabulary_size",
    "chat_template",
    "tool_template",
    "bos_text",
    "eos_text",
    "eos_token_ids",
    "fill",
    "generates",
    "ranks",
    "embedding_size",
)


class Roomy(Protocol):
    """An engine. ``room``: how many sequences its shards can have that take new ones, 0 without any."""

    @property
    def room(self) -> int: ...


class Modelled(Protocol):
    """An engine of a model."""

    @property
    def model(self) -> ModelFacts: ...


E = TypeVar("E", bound=Roomy)
M = TypeVar("M", bound=Modelled)


def may_be_same(one: ModelFacts, other: ModelFacts) -> bool:
    """Whether both are of one model: one file may be served under several names with other flags, and a name may get
    other weights. A shard that has not read its file yet counts by what tells files apart at once.
    """
    is_alike = (one.name, one.fingerprint) == (other.name, other.fingerprint)
    return is_alike and (one.sha256 == other.sha256 or "" in (one.sha256, other.sha256))


def find_engine(engines: Sequence[M], facts: ModelFacts, former: M | None) -> M | None:
    """Return the engine of a model: that of the same bytes first, then the one that the shard had."""
    found = [known for known in engines if may_be_same(known.model, facts)]
    return max(found, key=lambda known: (known.model.sha256 == facts.sha256, known is former), default=None)


def serving(engines: Sequence[E]) -> E:
    """Return the one of ``engines``, at least one, that gets new requests: with the most room, of equal ones the last.

    ``engines`` are in the order in which they joined.
    """
    return max(enumerate(engines), key=lambda entry: (entry[1].room, entry[0]))[1]


def tokens_mean_the_same(old: ModelFacts, new: ModelFacts) -> bool:
    """Whether prompts and outputs for ``old`` are such for ``new``: vocabulary, templates and uses are equal.

    A vocabulary whose fingerprint is not known equals no other.
    """
    known = old.vocabulary_fingerprint != "" and old.vocabulary_fingerprint == new.vocabulary_fingerprint
    return known and all(getattr(old, name) == getattr(new, name) for name in _MEANING)


def can_continue(spec: GenerationSpec, new: ModelFacts) -> bool:
    """Whether ``new``, whose tokens mean the same, has what a request was promised by the model that it replaces."""
    if spec.media is not None and (new.media is None or new.media.fingerprint != spec.media.encoder):
        return False
    keys = {new.adapter_key(name) for name in new.adapters}
    return (not spec.adapter or spec.adapter in keys) and spec.sampling.top_n_tokens <= new.max_top_n_tokens
