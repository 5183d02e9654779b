"""``python -m caravan_router.bench``: the same as ``caravan bench``."""

import sys

from caravan_router.bench.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
