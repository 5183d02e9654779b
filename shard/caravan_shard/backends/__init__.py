"""Models with a KV cache: `llama` runs llama.cpp, `toy` a toy model for tests and simulations.

`base` is the protocol that the rest of the shard uses; only `service.loading` names one of the two. May import
`sampling` and `arrays`; `llama` may read the configuration too. A backend must never know what a lease,
a command or a grammar is, and must never be called by another thread than the one that made it.
"""
