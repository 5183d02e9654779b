"""An index of two folders with one package each, and the variables that let pip know no other."""

import os
from pathlib import Path
from zipfile import ZipFile

_METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"


def write_index(folder: Path) -> None:
    """Write the folders `one`, with the package `first`, and `two`, with `second`."""
    for place, name in (("one", "first"), ("two", "second")):
        packages = folder / place / name
        packages.mkdir(parents=True)
        with ZipFile(packages / f"{name}-1.0-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}.py", "")
            archive.writestr(f"{name}-1.0.dist-info/METADATA", _METADATA.format(name=name))
            archive.writestr(f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        (packages / "index.html").write_text(f'<a href="{name}-1.0-py3-none-any.whl">{name}</a>')


def environment_of(index: Path) -> dict[str, str]:
    """Return the variables of a process whose pip knows this index only."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return kept | {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": (index / "one").as_uri(),
        "PIP_EXTRA_INDEX_URL": (index / "two").as_uri(),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
