"""`python -m caravan_serve` is `caravan`."""

import sys

from caravan_serve.commands import main

sys.exit(main())
