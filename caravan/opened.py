"""A model that runs on its own thread, until it is closed or the program ends."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from caravan.background import BackgroundLoop


class OpenedModel:
    """Opens a model. The code that makes it closes it."""

    def __init__(self, model: str | Path, options: Mapping[str, Any]) -> None:
        """Load the model. Raises ModelError, and TypeError or ValueError for options."""
        # Imported here, so that importing the package is quick and needs neither router nor shard.
        from caravan.local_model import LocalModel

        self.local: LocalModel = LocalModel(model, options)
        self.loop = BackgroundLoop()
        try:
            self.loop.run(self.local.open(self.loop.fail))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        self.loop.close(self.local.close)
