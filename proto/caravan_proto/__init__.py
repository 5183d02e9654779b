"""What router and shard share: messages, the gRPC contract, error codes, channel options, flags and logging.

Imports the standard library, grpc and protobuf only.
"""

__version__ = "0.5.0"
