"""Where progress is shown as bars: on terminals and in notebooks, as tqdm draws them there."""

import sys
from importlib.util import find_spec
from typing import Any, TextIO


def shows_bars(stream: TextIO) -> bool:
    """Return whether people see a bar: ``stream`` is a terminal, or the program runs in a notebook, and tqdm is there.

    A client may be installed without it.
    """
    return (stream.isatty() or _is_notebook()) and find_spec("tqdm") is not None


def _is_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    # Only a shell that a kernel runs has one; IPython on a terminal has none.
    return getattr(shell, "kernel", None) is not None


def new_bar(**options: Any) -> Any:
    """Return a bar of tqdm with its ``options``, drawn for a notebook if the program runs in one."""
    # Imported here: it looks at the notebook, and not every program has bars.
    from tqdm.auto import tqdm

    return tqdm(dynamic_ncols=True, **options)
