"""``python -m caravan_serve.bench``: the same as ``caravan bench``."""

import sys

from caravan_serve.bench.cli import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
