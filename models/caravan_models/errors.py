"""What can go wrong with a model's name: kinds with stable codes, each told in one line that says what to do."""

from enum import Enum

from caravan_proto.packages import Part, install_command


class FetchProblem(Enum):
    """Kinds of failures. Callers decide by them, people read the sentence."""

    BAD_REFERENCE = "bad_reference"
    UNKNOWN_NAME = "unknown_name"
    NO_REPOSITORY = "no_repository"
    NO_REVISION = "no_revision"
    GATED = "gated"
    BAD_TOKEN = "bad_token"
    REFUSED = "refused"
    NO_FILE = "no_file"
    NO_QUANTISATION = "no_quantisation"
    AMBIGUOUS = "ambiguous"
    NO_MODEL = "no_model"
    MISSING_PARTS = "missing_parts"
    IS_PROJECTOR = "is_projector"
    NOT_GGUF = "not_gguf"
    NO_DIGEST = "no_digest"
    WRONG_DIGEST = "wrong_digest"
    WRONG_SIZE = "wrong_size"
    NO_NETWORK = "no_network"
    CUT_OFF = "cut_off"
    HUB_FAILS = "hub_fails"
    TOO_MANY_REQUESTS = "too_many_requests"
    NO_HUB = "no_hub"
    NOT_CACHED = "not_cached"
    BUSY = "busy"
    DISK_FULL = "disk_full"
    CACHE_UNUSABLE = "cache_unusable"
    NEEDS_PACKAGES = "needs_packages"
    BROKEN = "broken"


class FetchError(Exception):
    """A model cannot be had under its name. The text is one line, whatever a hub said."""

    def __init__(self, problem: FetchProblem, sentence: str) -> None:
        super().__init__(" ".join(sentence.split()))
        self.problem = problem


def needs_packages(missing: ModuleNotFoundError) -> FetchError:
    """Return the error of a host without huggingface_hub."""
    return FetchError(
        FetchProblem.NEEDS_PACKAGES,
        f"models by name need packages that are not installed: {install_command(Part.MODELS)} ({missing})",
    )
