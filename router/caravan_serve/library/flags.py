"""The flags of `caravan serve` for models that are loaded as requests ask for them."""

from dataclasses import dataclass

from caravan_proto.flags import flag


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryFlags:
    """Where the models are described, and what may be loaded at a time."""

    models_dir: str | None = flag(
        None, "folder of GGUF files, each a model that is loaded when a request asks for it, and makes room for others"
    )
    models_file: str | None = flag(
        None, "TOML file of models that are loaded when a request asks for them, with their names, aliases and flags"
    )
    models_hub: bool = flag(
        False,
        "serve every model of the hub's cache (see `caravan list`) when a request asks for it, and let operators "
        "download and delete some and make others of them, with /api/pull, /api/delete, /api/copy and /api/create",
    )
    models_max: int | None = flag(None, "most models that are loaded at a time [as many as fit]", low=1)
    models_memory: int | None = flag(
        None, "most MiB of this host's memory that all loaded models take [what is free]", low=1
    )
    models_turn_s: float = flag(
        30.0,
        "seconds that a loaded model with requests keeps its place while another one's requests wait for it",
        low=0,
    )
    models_autoload: bool = flag(True, "let requests load models; else only operators do, with /models/load")

    @property
    def has_library(self) -> bool:
        """Whether models are loaded as requests ask for them."""
        return self.models_dir is not None or self.models_file is not None or self.models_hub
