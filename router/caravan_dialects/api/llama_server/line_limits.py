"""Ends an output at a line end or an indentation, as editors want."""

import time


class LineLimits:
    """Watches an output for the ends that llama-server's ``n_indent`` and ``t_max_predict_ms`` mean.

    ``indent``: from the second line on, the output ends at the first line that is indented by fewer spaces and tabs; 0
    for no such end. ``seconds``: the output ends at the first line end that comes later after the first token; 0 for no
    such end.
    """

    def __init__(self, indent: int, seconds: float) -> None:
        self._indent = indent
        self._seconds = seconds
        self._began = 0.0
        # Spaces and tabs at the start of the line so far; None behind them, and in the first line.
        self._leading: int | None = None
        self.has_new_line = False
        self.ended = False

    def take(self, text: str) -> str:
        """Return what of the next ``text`` belongs to the output, and set ``ended`` if it ends there."""
        if not self._began:
            self._began = time.monotonic()
        if not self._indent and "\n" not in text:
            return text
        is_late = self._seconds > 0 and time.monotonic() - self._began > self._seconds
        for place, character in enumerate(text):
            if self._leading is not None:
                if character in " \t":
                    self._leading += 1
                    continue
                if self._leading < self._indent:
                    self.ended = True
                    return text[:place]
                self._leading = None
            if character == "\n":
                self.has_new_line = True
                self._leading = 0
                if is_late:
                    self.ended = True
                    return text[: place + 1]
        return text
