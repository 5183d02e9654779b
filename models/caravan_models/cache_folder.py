"""Where huggingface_hub keeps its files on this machine."""

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
