"""The parameters of a sequence, with what the shard has made of them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from caravan_proto.messages.commands import Prefill, SequenceParameters
from caravan_proto.messages.constraint import Constraint
from caravan_shard.constraints.grammar import Grammar
from caravan_shard.sampling.processors import ProcessorRegistry, Processors


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedParameters(SequenceParameters):
    """``grammar``: the compiled constraint; None without one.

    ``processors``: the functions that ``sampling.processors`` is the key of; None if there are none.
    """

    grammar: Grammar | None = None
    processors: Processors | None = None

    @property
    def trace_id(self) -> str:
        """The id of the trace, which a valid ``traceparent`` has behind its version; empty without one."""
        return self.traceparent[3:35]

    @property
    def is_sampled(self) -> bool:
        """Whether the span of the request is recorded: the lowest bit of the flags at the end of ``traceparent``."""
        return self.traceparent[-1:] in set("13579bdf")


def prepared(command: Prefill, grammars: Mapping[Constraint, Grammar], processors: ProcessorRegistry) -> Prefill:
    """Return ``command`` with the `PreparedParameters` of the sequences that it starts.

    ``grammars`` holds the compiled ones of its constraints.
    """

    def prepare(setup: SequenceParameters) -> PreparedParameters:
        return PreparedParameters(
            **{field.name: getattr(setup, field.name) for field in fields(SequenceParameters)},
            grammar=None if setup.constraint is None else grammars[setup.constraint],
            processors=processors.find(setup.sampling.processors),
        )

    chunks = [chunk if chunk.setup is None else replace(chunk, setup=prepare(chunk.setup)) for chunk in command.chunks]
    return replace(command, chunks=chunks)
