"""The command `caravan-shard`, also as `python -m caravan_shard`."""

import sys

from caravan_proto.environment import end_on_early_sigterm, prepare_grpc
from caravan_proto.standard_output import ending_with_its_reader


@ending_with_its_reader()
def main() -> int:
    """Run the shard."""
    end_on_early_sigterm()
    prepare_grpc()
    from caravan_shard.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
