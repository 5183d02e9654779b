"""Files of models for `--models-file`, whose own files are empty: toys do not read them."""

import json
from pathlib import Path


def write_models(folder: Path, *names: str, **facts: object) -> Path:
    """Write a file of models, each with a file of its own."""
    lines = []
    for name in names:
        (folder / f"{name}.gguf").write_bytes(b"GGUF")
        lines += ["[[models]]", f'name = "{name}"', f'model = "{name}.gguf"', "memory_mib = 100"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in facts.items()]
    file = folder / "models.toml"
    file.write_text("\n".join(lines))
    return file
