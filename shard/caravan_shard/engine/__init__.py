"""The thread that owns the model: it takes checked commands, runs steps and samples tokens.

May import `checks` and below. Must never import gRPC or the configuration. Everything runs on the worker's thread but
`Worker.submit`, `Worker.release_all` and the event loop's side of `Replies`. A step must change nothing that the shard
knows before its forward pass has succeeded.
"""
