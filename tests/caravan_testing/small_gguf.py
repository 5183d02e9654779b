"""Files that are GGUF by their header, and of which nothing else is read."""

import random
import struct


def small_gguf(size: int = 4096, *, architecture: str = "llama", seed: int = 0) -> bytes:
    """Return a file of ``size`` bytes: a header that names the architecture, and bytes that differ by ``seed``."""
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 3)
    header += _text("general.architecture") + struct.pack("<I", 8) + _text(architecture)
    header += _text(f"{architecture}.context_length") + struct.pack("<II", 4, 2048)
    header += _text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + _text("a") + _text("b")
    assert len(header) <= size, "the header has no room"
    return header + random.Random(seed).randbytes(size - len(header))


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()
