"""What the worker is asked and what it answers, beyond the messages that router and shard share.

May import `backends.base`, `constraints`, `sampling` and below. Must never import protobuf: `service` translates.
Nothing in a command is checked yet; `checks` does that.
"""
