"""Parameters of OpenAI's routes and vLLM that end an output or select the tokens that its text shows."""

from caravan_dialects.api.generation.checks import check_range, check_stops
from caravan_dialects.api.generation.rules import token_id_error
from caravan_dialects.api.limits import Limits
from caravan_dialects.api.openai.rules import too_many_stop_tokens_error
from caravan_dialects.api.openai.schema import GeneratingFields
from caravan_dialects.text.assembler import TextOptions
from caravan_proto.limits import MAX_STOP_TOKEN_IDS
from caravan_scheduler.core.engine import ModelFacts
from caravan_scheduler.core.generation import StoppingParams


def text_options_of(fields: GeneratingFields, limits: Limits) -> TextOptions:
    """Return how tokens become text. Raises ValidationError."""
    stops = [fields.stop] if isinstance(fields.stop, str) else fields.stop or ()
    return TextOptions(
        stops=check_stops(stops, limits),
        keep_stop=bool(fields.include_stop_str_in_output),
        special_text=fields.skip_special_tokens is False,
        min_tokens=fields.min_tokens or 0,
    )


def stopping_of(fields: GeneratingFields, max_new: int, model: ModelFacts) -> StoppingParams:
    """Return when a sequence of at most ``max_new`` tokens ends. Raises ValidationError."""
    check_range("min_tokens", fields.min_tokens, 0, max_new)
    stop_token_ids = fields.stop_token_ids or ()
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise too_many_stop_tokens_error(MAX_STOP_TOKEN_IDS, len(stop_token_ids))
    for token_id in stop_token_ids:
        if not 0 <= token_id < model.vocabulary_size:
            raise token_id_error("stop_token_ids", model.vocabulary_size, token_id)
    return StoppingParams(
        max_new_tokens=max_new,
        ignore_eos=bool(fields.ignore_eos),
        stop_token_ids=frozenset(stop_token_ids),
        min_tokens=fields.min_tokens or 0,
    )
