"""What an architecture's name says of a model."""

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


def is_encoder(architecture: str) -> bool:
    """Whether models of this architecture, as GGUF files name it, embed texts and do nothing else."""
    return architecture in _ONLY_EMBED
