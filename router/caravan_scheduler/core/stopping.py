"""When a generation stops. Values are valid: the API checks them, and nobody checks them again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoppingParams:
    """When a sequence ends on the shard. Stop strings are text: the text layer looks for them.

    ``stop_token_ids``: at most `caravan_proto.limits.MAX_STOP_TOKEN_IDS` ids that end the sequence when sampled.
    ``min_tokens``: the least number of output tokens before an end token or one of ``stop_token_ids`` can be sampled;
    at most ``max_new_tokens``. A constraint that allows nothing else prevails.
    """

    max_new_tokens: int
    ignore_eos: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
