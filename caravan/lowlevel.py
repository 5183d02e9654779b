"""The model under an `Executor`, for programs that build their own engine: steps, cells, the vocabulary, the sampler.

Nothing here keeps track of conversations, or takes back a step that has failed. `Executor.backend` is a `Backend` too.
"""

from pathlib import Path
from typing import Unpack

from caravan.errors import ModelError
from caravan.options import ModelOptions, split_options
from caravan.python_names import in_python, python_names
from caravan_proto.flags import from_values
from caravan_proto.messages.commands import PrefixCopy
from caravan_proto.messages.limits import KvLayout, LayoutLimits, Saving
from caravan_proto.messages.model import ModelFile
from caravan_proto.messages.sampling import SamplingParams
from caravan_shard.backends.base import Backend, Capacity, CellSlice, DecodeOutcome, Piece, TokenBatch, Vocabulary
from caravan_shard.config import ShardConfig
from caravan_shard.named_models import with_model_files_blocking
from caravan_shard.sampling.choice import Choice
from caravan_shard.sampling.sampler import Sampler
from caravan_shard.service.loading import backend_loader
from caravan_shard.startup_error import StartupError

__all__ = [
    "Backend",
    "Capacity",
    "CellSlice",
    "Choice",
    "DecodeOutcome",
    "KvLayout",
    "LayoutLimits",
    "ModelFile",
    "Piece",
    "PrefixCopy",
    "Sampler",
    "SamplingParams",
    "Saving",
    "TokenBatch",
    "Vocabulary",
    "make_sampler",
    "open_backend",
]


def open_backend(model: str | Path, **options: Unpack[ModelOptions]) -> Backend:
    """Load ``model``, a file or a name as in `LLM`. Only the calling thread may use it, and closes it.

    Raises ModelError, and TypeError or ValueError if an option is wrong.
    """
    of_model, _ = split_options(model, options)
    with python_names():
        config = from_values(ShardConfig, of_model)
    return load_backend(config)


def load_backend(config: ShardConfig) -> Backend:
    """Load what ``config`` names. Raises ModelError."""
    try:
        return backend_loader(with_model_files_blocking(config))()
    except StartupError as error:
        raise ModelError(in_python(str(error))) from None


def make_sampler(backend: Backend, threads: int = 1) -> Sampler:
    """Return what chooses tokens from the logits of ``backend`` as a server does; `close` ends its ``threads``."""
    return Sampler(backend.candidate_filter, threads, backend.joint_draw, backend.joint_logprobs)
