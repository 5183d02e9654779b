"""The command `caravan-shard`, also as `python -m caravan_shard`."""

import faulthandler
import os
import sys

from caravan_proto.environment import end_on_early_sigterm, prepare_grpc
from caravan_proto.packages import Part, lack
from caravan_proto.standard_output import ending_with_its_reader
from caravan_shard.huge_pages import use_huge_pages


@ending_with_its_reader()
def main() -> int:
    """Run the shard."""
    use_huge_pages()
    end_on_early_sigterm()
    if sys.stderr is not None:
        # What ends in C code, of llama.cpp, gRPC or our own, says where each thread was.
        faulthandler.enable()
    # Instead of that, ggml would run a debugger where an exception ends the process. If two threads have one at a time,
    # each holds the pipe for which the debugger of the other waits, and the process never ends. ggml reads the variable
    # when it is loaded.
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    if lacking := lack(Part.SHARD):
        sys.stderr.write(f"caravan-shard: error: it {lacking}\n")
        return 2
    prepare_grpc()
    from caravan_shard.cli import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
