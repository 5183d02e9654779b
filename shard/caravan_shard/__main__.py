"""`python -m caravan_shard`."""

import sys

from caravan_shard.cli import main

if __name__ == "__main__":
    sys.exit(main())
