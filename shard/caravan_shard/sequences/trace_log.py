"""Log lines about sequences whose requests are traced. They name the trace, so that it leads to the shard's log."""

import logging

from caravan_shard.sequences.sequence import Sequence

_log = logging.getLogger(__name__)


def log_traced(sequence: Sequence, message: str, **fields: object) -> None:
    """Log an event of ``sequence`` if its request is traced: for everybody if the trace is sampled, else to debug."""
    parameters = sequence.parameters
    if parameters.traceparent:
        level = logging.INFO if parameters.is_sampled else logging.DEBUG
        _log.log(level, message, extra={"trace_id": parameters.trace_id, "sequence": sequence.sequence_id, **fields})
