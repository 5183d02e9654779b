"""Finds out whether a model can draft with a head of its own, before it is loaded."""

from pathlib import Path

from caravan_models.cached_model import parts_of
from caravan_models.errors import FetchError
from caravan_models.gguf_header import ARCHITECTURE, GgufHeader, read_header
from caravan_shard.backends.llama.heads.states import can_get_states
from caravan_shard.config import ShardConfig
from caravan_shard.startup_error import StartupError

# Architectures whose graph of the head is known here: where it has none, or several layers, llama.cpp ends the process.
# All of these graphs hand out the hidden states of all tokens; some others, of those with logits only.
_ARCHITECTURES = frozenset({"glm4moe", "qwen35", "qwen35moe"})


def wants_head(config: ShardConfig) -> bool:
    """Whether the model that ``config`` names is to draft with its own head. Raises StartupError if it must and cannot.

    llama.cpp must be initialized.
    """
    if config.spec_type == "none" or config.model_draft:
        return False
    path = Path(config.model)
    try:
        reason = _why_not([read_header(part) for part in parts_of(path)])
    except (OSError, FetchError) as error:
        raise StartupError(f"cannot read {path}: {error}") from error
    if reason and config.spec_type != "auto":
        raise StartupError(f"{path.name} cannot draft by itself as --spec-type {config.spec_type} asks: {reason}")
    return not reason


def _why_not(headers: list[GgufHeader]) -> str:
    """Return why a model cannot draft; empty if it can."""
    architecture = headers[0].text(ARCHITECTURE)
    count = headers[0].number(f"{architecture}.nextn_predict_layers") or 0
    if not count or not any(header.has_head for header in headers):
        return "the file has no head for it"
    if architecture not in _ARCHITECTURES or count > 1:
        return f"{count} head{'s' * (count > 1)} of the architecture {architecture} cannot be used yet"
    return "" if can_get_states() else "this build of llama.cpp does not hand out hidden states"
