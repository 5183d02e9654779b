"""The table of values in the chart's README, made from values.yaml: each value with its default and its comment."""

import re
from collections.abc import Iterator
from itertools import takewhile

from deploy.chart import CHART

README = CHART / "README.md"
_START, _END = "<!-- values -->", "<!-- end of values -->"
_KEY = re.compile(r"^( *)([A-Za-z]+):(?: (.*))?$")
_COMMENT = re.compile(r"^ *# ?(.*)$")


def with_table(readme: str) -> str:
    """Return the README with the table as it should be now."""
    before, _, rest = readme.partition(_START)
    _, _, after = rest.partition(_END)
    rows = "\n".join(f"| `{name}` | {default} | {comment} |" for name, default, comment in _rows())
    return f"{before}{_START}\n| value | default | meaning |\n|---|---|---|\n{rows}\n{_END}{after}"


def _rows() -> Iterator[tuple[str, str, str]]:
    above: list[tuple[int, str]] = []
    comment: list[str] = []
    for line in (CHART / "values.yaml").read_text().splitlines():
        if found := _COMMENT.match(line):
            comment.append(found[1].strip())
            continue
        if found := _KEY.match(line):
            indent, key, value = len(found[1]), found[2], found[3]
            above = [(level, name) for level, name in above if level < indent]
            path = ".".join([*(name for _, name in above), key])
            if value is None:
                above.append((indent, key))
            # What has values of its own is named only if there is something to say about it.
            if value is not None or comment:
                # Examples are for those who edit the file: they are items of a list, or follow an empty line.
                words = takewhile(bool, (part for part in comment if not part.startswith("- ")))
                yield path, "" if value is None else f"`{value}`", " ".join(words).replace("|", "\\|")
        comment = []
