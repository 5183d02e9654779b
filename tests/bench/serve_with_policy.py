"""`caravan serve` with another policy for jobs, to compare: `python -m bench.serve_with_policy LRU FLAGS`."""

import sys
from functools import partial
from unittest.mock import patch

from bench.simulate.policies import JobPolicy
from caravan_proto.environment import prepare_grpc
from caravan_scheduler.scheduler import Scheduler
from caravan_serve.commands import serve


def main() -> int:
    """Serve with the policy that the first argument names."""
    name, *flags = sys.argv[1:]
    prepare_grpc()
    # It imports gRPC, which reads what was prepared.
    from caravan_router.engine import batcher

    with patch.object(batcher, "Scheduler", partial(Scheduler, new_policy=JobPolicy[name].new)):
        return serve(flags)


if __name__ == "__main__":
    sys.exit(main())
