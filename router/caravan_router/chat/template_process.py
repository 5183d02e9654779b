"""``python -m caravan_router.chat.template_process``: renders chat templates, one after another, until its input ends.

Templates come with models, which come from anywhere. The sandbox keeps a template from running Python code, but not
from computing ``'x' * 10**9`` or looping forever. It therefore runs in a process with limited memory, which the kernel
kills when the time is up: no code of the template can prevent that.
"""

import resource
import signal
import sys
from typing import BinaryIO

import msgspec

from caravan_router.chat.template_environment import compiled
from caravan_router.chat.template_messages import LENGTH_BYTES, RenderReply, RenderRequest, framed

# Limit of the address space, which includes Python and jinja2 (about 60 MB).
MEMORY_BYTES = 512 << 20
_PROBLEM_CHARACTERS = 500

_DECODER = msgspec.json.Decoder(RenderRequest)


def render(request: RenderRequest) -> RenderReply:
    """Render one template. Whatever it raises becomes the ``problem`` of the reply."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in compiled(request.source).generate(request.variables):
            size += len(piece.encode())
            if size > request.max_bytes:
                return RenderReply(given_bytes=size)
            pieces.append(piece)
    except MemoryError:
        return RenderReply(problem="it needs too much memory")
    except RecursionError:
        return RenderReply(problem="it is nested too deeply")
    except Exception as error:  # noqa: BLE001 - a template can raise anything that Python code can
        return RenderReply(problem=(str(error) or type(error).__name__)[:_PROBLEM_CHARACTERS])
    return RenderReply(text="".join(pieces))


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer requests until ``requests`` ends."""
    while len(head := requests.read(LENGTH_BYTES)) == LENGTH_BYTES:
        request = _DECODER.decode(requests.read(int.from_bytes(head, "big")))
        # The signal has its default action: the kernel kills the process.
        signal.setitimer(signal.ITIMER_REAL, request.time_limit_s)
        reply = framed(render(request))
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(reply)
        replies.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    serve(sys.stdin.buffer, sys.stdout.buffer)
