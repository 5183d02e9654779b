"""What a model's own files say of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from caravan_models.gguf_header import ARCHITECTURE, Value, read_header
from caravan_models.listing import quantisation_of

# The graphs of these architectures end with a vector for each token: there are no logits.
_ONLY_EMBED = frozenset(
    {
        "bert",
        "eurobert",
        "gemma-embedding",
        "jina-bert-v2",
        "jina-bert-v3",
        "llama-embed",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
    }
)
# LLAMA_FTYPE_* of llama.h: the type of most weights, as its tools call it.
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4",
    40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
# Of the token before what precedes a gap, and before what follows it; older files have the second key of each.
_FILL_KEYS = tuple(
    (f"tokenizer.ggml.fim_{short}_token_id", f"tokenizer.ggml.{long}_token_id")
    for short, long in (("pre", "prefix"), ("suf", "suffix"))
)
# The sampling that a file recommends, by GGUF key, and the field of a request that means the same.
RECOMMENDED = {
    f"general.sampling.{name}": field
    for name, field in {
        "temp": "temperature",
        "top_k": "top_k",
        "top_p": "top_p",
        "min_p": "min_p",
        "xtc_probability": "xtc_probability",
        "xtc_threshold": "xtc_threshold",
        "penalty_last_n": "repeat_last_n",
        "penalty_repeat": "repetition_penalty",
        "mirostat": "mirostat",
        "mirostat_tau": "mirostat_tau",
        "mirostat_eta": "mirostat_eta",
    }.items()
}


def is_encoder(architecture: str) -> bool:
    """Whether models of this architecture, as GGUF files name it, embed texts and do nothing else."""
    return architecture in _ONLY_EMBED


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """Texts are empty, and numbers None, where the file does not say it. ``trained_context``: in tokens.

    ``fills``: the file names the tokens around a gap that is to be filled. ``metadata``: all but lists, by GGUF key.
    """

    title: str
    architecture: str
    parameter_count: int
    quantisation: str
    trained_context: int | None
    layer_count: int | None
    licence: str
    chat_template: str
    fills: bool
    metadata: Mapping[str, Value]


def gguf_facts(parts: Sequence[Path]) -> GgufFacts:
    """Return what the files of a model say; the first part has the metadata of all. Raises FetchError, OSError."""
    headers = [read_header(part) for part in parts]
    first = headers[0]
    architecture = first.text(ARCHITECTURE)
    file_type = first.number("general.file_type")
    return GgufFacts(
        title=first.text("general.name"),
        architecture=architecture,
        parameter_count=sum(header.parameter_count for header in headers),
        quantisation=_FILE_TYPES.get(-1 if file_type is None else file_type) or quantisation_of(parts[0].stem),
        trained_context=first.number(f"{architecture}.context_length"),
        layer_count=first.number(f"{architecture}.block_count"),
        licence=first.text("general.license"),
        chat_template=first.text("tokenizer.chat_template"),
        fills=all(any(first.number(key) is not None for key in keys) for keys in _FILL_KEYS),
        metadata=first.metadata,
    )
