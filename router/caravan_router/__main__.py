"""`python -m caravan_router` is `caravan`."""

import sys

from caravan_router.commands import main

sys.exit(main())
