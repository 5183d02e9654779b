"""The words that router and shard share: commands, results, limits and parameters, each defined once.

Frozen dataclasses, named tuples and enums. Imports nothing but the standard library. Durations are in seconds, and in
nanoseconds on the wire only.
"""
