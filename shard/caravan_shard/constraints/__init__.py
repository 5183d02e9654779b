"""Constrains outputs to a JSON schema, a regular expression or a grammar, by llguidance's token masks.

May import `backends.base` and below. A client's source may be hostile: it must never reach llama.cpp's grammar parser,
which it could crash, and never be compiled in this process before `check_process` has survived it.

The way of a constraint: `Constraint` (the client's text), checked by `Checker` in its own process, compiled once by
`ConstraintCompiler` to a `Grammar`, and followed by a `Matching` for each sequence. `Finder` computes masks while the
forward pass runs, or at once where that takes less time than to wake a thread.
"""
