"""Writes the tokenizer of a GGUF file in the form of Hugging Face's tokenizers."""

import json
from pathlib import Path
from typing import Any

from gguf import GGUFReader


def write_hf_tokenizer(model: Path, folder: Path) -> Path:
    """Write what `AutoTokenizer` reads, for a byte-level vocabulary with merges such as SmolLM2's, to ``folder``."""
    fields = GGUFReader(model).fields

    def values(name: str) -> list[Any]:
        field = fields[f"tokenizer.ggml.{name}"]
        return [field.parts[index] for index in field.data]

    tokens, merges = ([bytes(part).decode() for part in values(name)] for name in ("tokens", "merges"))
    control = 3
    special = [index for index, kind in enumerate(values("token_type")) if int(kind[0]) == control]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": index,
                "content": tokens[index],
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for index in special
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }
    end = tokens[int(fields["tokenizer.ggml.eos_token_id"].parts[-1][0])]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "bos_token": end})
    )
    return folder
