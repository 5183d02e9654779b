"""The commands of a router and the results of a shard, as the shard's own types.

May import `backends.base`, `constraints`, `sampling` and below. Must never import protobuf: the codecs in `service`
translate. Nothing in a command is checked yet; `checks` does that.
"""
