"""Python imports this at its start where this folder is in PYTHONPATH: shards then draft whatever it costs."""

import sys
from functools import partialmethod

if sys.orig_argv[1:3] == ["-m", "caravan_shard"]:
    from caravan_shard.engine.drafts import Drafting

    Drafting.__init__ = partialmethod(Drafting.__init__, always=True)  # type: ignore[assignment]
