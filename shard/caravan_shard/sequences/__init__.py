"""The sequences that a shard holds, and the saved runs, which outlive them.

May import `protocol` and below. `SequencePool` is the only writer: it changes sequences and the backend's cache
together, so that both always agree. Nothing here checks a command, and nothing runs a forward pass.
"""
