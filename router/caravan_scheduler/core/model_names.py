"""The names that a fleet's models have, apart from those that have joined."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class ModelNames:
    """``expected``: of models that are sure to join; the first is the default. Any other model may join, too.

    ``aliases``: other names that models answer to, each with the name that it means. ``strict``: a model answers to its
    own names only, since there are expected models, or several were served at a time. ``load_on_demand``: a request may
    have its model loaded, so that all may be without a shard.
    """

    expected: tuple[str, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)
    strict: bool = False
    load_on_demand: bool = False

    def meant(self, name: str) -> str:
        """Return the name of the model that ``name`` means, itself if it is no alias."""
        return self.aliases.get(name, name)
