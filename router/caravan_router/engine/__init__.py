"""The shell around the scheduler: one event loop, gRPC channels to the shards, a token stream per request."""

import os

# Before gRPC is loaded. The router's children become other programs at once and never use its channels; with gRPC's
# support for forking, each start of one would be a warning on standard error.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
