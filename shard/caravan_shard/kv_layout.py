"""How the cells of the KV cache are given to sequences."""

from enum import Enum


class KvLayout(Enum):
    """The two layouts of llama.cpp's cache.

    UNIFIED: all sequences take cells from one pool. A copied prefix shares the cells of its source. Attention looks at
    every used cell, whichever sequence holds it.
    SPLIT: each sequence has cells / sequences cells of its own. A copied prefix is a copy.
    """

    UNIFIED = "unified"
    SPLIT = "split"
