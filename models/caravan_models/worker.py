"""The process that downloads one model: `python -m caravan_models.worker`, with a request on standard input.

It ends as soon as its standard input does, so that none is left over when its parent is killed.
"""

import logging
import os
import sys
import threading
import time

from caravan_models.errors import FetchError, needs_packages
from caravan_models.fetching import Answer, answer_line, read_request
from caravan_models.progress import FetchStage, Progress

_INTERVAL_S = 0.1


class _Teller:
    """Writes answers to standard output, and of the many counts of bytes some in a second."""

    def __init__(self) -> None:
        self._last: tuple[FetchStage, str] | None = None
        self._told_at = 0.0

    def progress(self, progress: Progress) -> None:
        now, step = time.monotonic(), (progress.stage, progress.file)
        whole = progress.file_done == progress.file_size
        if step != self._last or whole or now - self._told_at >= _INTERVAL_S:
            self._last, self._told_at = step, now
            self.tell(progress)

    def tell(self, answer: Answer) -> None:
        try:
            sys.stdout.buffer.write(answer_line(answer))
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            os._exit(1)


def _end_with_parent() -> None:
    # What follows the request is the end of the parent.
    while sys.stdin.buffer.read(1):
        pass
    os._exit(1)


def main() -> int:
    """Download what is asked for; tell how far it is, and how it ended."""
    teller = _Teller()
    request = sys.stdin.buffer.readline()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    # What huggingface_hub logs is either in the one line of an error, or of no use.
    logging.basicConfig(level=logging.CRITICAL)
    try:
        try:
            from caravan_models.download import download
            from caravan_models.hub import HubSettings
        except ModuleNotFoundError as error:
            raise needs_packages(error) from error
        logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
        teller.tell(download(read_request(request), HubSettings(), teller.progress))
    except FetchError as error:
        teller.tell(error)
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # Threads of the HTTP client may wait for a server that is silent.
    os._exit(code)
