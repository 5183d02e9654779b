"""The flags of `caravan serve` for models that are loaded as requests ask for them."""

from dataclasses import dataclass

from caravan_proto.flags import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFlags:
    """Where the models are described, and what may be loaded at a time."""

    models_dir: str | None = flag(
        None, "folder of GGUF files; each is a model that is loaded on demand and unloaded to make room for others"
    )
    models_file: str | None = flag(None, "TOML file of models to load on demand, with their names, aliases and flags")
    models_hub: bool = flag(
        False,
        "serve every model in the hub cache (see `caravan list`) on demand, and let operators download, delete, copy "
        "and derive models with /api/pull, /api/delete, /api/copy and /api/create",
    )
    models_max: int | None = flag(None, "maximum number of models loaded at a time [as many as fit]", low=1)
    models_memory: int | None = flag(
        None, "memory limit for all loaded models together, in MiB of this host's memory [what is free]", low=1
    )
    models_turn_s: float = flag(
        30.0,
        "seconds that a loaded model with requests stays loaded while requests for another model wait",
        low=0,
    )
    models_autoload: bool = flag(
        True, "load models when requests ask for them; when off, only operators load them, with /models/load"
    )

    @property
    def has_library(self) -> bool:
        """Whether models are loaded as requests ask for them."""
        return self.models_dir is not None or self.models_file is not None or self.models_hub
