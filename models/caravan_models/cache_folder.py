"""Where files are kept on this machine: those of huggingface_hub, and what is remembered of model files."""

import os
from pathlib import Path

from caravan_models.errors import needs_extra


def cache_folder() -> Path:
    """Return the folder of its cache, by HF_HUB_CACHE or HF_HOME. Raises FetchError if it is not installed."""
    try:
        from huggingface_hub import constants
    except ModuleNotFoundError as error:
        raise needs_extra(error) from error
    return Path(os.path.expanduser(constants.HF_HUB_CACHE))


def digests_folder() -> Path | None:
    """Return the folder in which digests of files are remembered; None if this user has no place for it."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # there is no home
        return None
    return cache / "caravan" / "digests"
