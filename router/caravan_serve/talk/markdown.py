"""Divides streamed Markdown into blocks, so that a block is rendered once it can change no more."""

import re

_FENCE = re.compile(r" *(`{3,}|~{3,})")
_ITEM = re.compile(r" {0,3}(?:[-*+]|\d{1,9}[.)])(?: |$)")


class Blocks:
    """Takes a text in pieces. A block ends at a blank line, but not within a fence of code or between list items."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._partial = ""
        self._fence = ""
        # Whether blank lines follow the lines of this block.
        self._is_blank = False

    @property
    def rest(self) -> str:
        """The text of the block that has not ended."""
        return "\n".join([*self._lines, self._partial]).strip("\n")

    def feed(self, text: str) -> list[str]:
        """Add text, and return the blocks that have ended by it."""
        ended: list[str] = []
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            ended += self._add(line)
        return ended

    def end(self) -> list[str]:
        """Return the blocks that the end of the text ends."""
        ended = self.feed("\n")
        rest = self.rest
        self._lines, self._fence, self._is_blank = [], "", False
        return [*ended, rest] if rest else ended

    def _add(self, line: str) -> list[str]:
        if self._fence:
            self._lines.append(line)
            if (found := _FENCE.fullmatch(line.rstrip())) and found[1].startswith(self._fence):
                self._fence = ""
            return []
        if not line.strip():
            self._is_blank = bool(self._lines)
            self._lines += [""] if self._lines else []
            return []
        ended: list[str] = []
        if self._is_blank and not self._continues(line):
            ended = ["\n".join(self._lines).strip("\n")]
            self._lines = []
        self._is_blank = False
        self._lines.append(line)
        if found := _FENCE.match(line):
            self._fence = found[1]
        return ended

    def _continues(self, line: str) -> bool:
        """Whether ``line`` after a blank one belongs to the same list."""
        return bool(_ITEM.match(self._lines[0])) and bool(line.startswith(("  ", "\t")) or _ITEM.match(line))
