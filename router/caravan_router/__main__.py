"""The command `caravan-router`, which `python -m caravan_router` is too."""

import sys

from caravan_proto.environment import end_on_early_sigterm, prepare_grpc, raise_open_files
from caravan_proto.packages import Part, lack
from caravan_proto.standard_output import ending_with_its_reader


@ending_with_its_reader()
def main() -> int:
    """Run a router with the flags of this process."""
    return run(sys.argv[1:])


def run(flags: list[str]) -> int:
    """Run a router with ``flags``. What it needs is imported when the process is ready for that."""
    end_on_early_sigterm()
    if lacking := lack(Part.ROUTER):
        sys.stderr.write(f"caravan-router: error: it {lacking}\n")
        return 2
    prepare_grpc()
    raise_open_files()
    from caravan_router.cli import main as run_router

    return run_router(flags)


if __name__ == "__main__":
    sys.exit(main())
