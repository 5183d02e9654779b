"""The command `caravan-shard`, also as `python -m caravan_shard`."""

import sys

from caravan_proto.environment import end_on_early_sigterm, prepare_grpc


def main() -> int:
    """Run the shard."""
    end_on_early_sigterm()
    prepare_grpc()
    from caravan_shard.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
