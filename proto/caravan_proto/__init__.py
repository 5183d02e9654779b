"""What router and shard must agree on, and nothing else: the gRPC contract, error codes, channel options, conventions.

May import the standard library, grpc and protobuf only.
"""

__version__ = "0.1.0"
