"""``python -m caravan_dialects.chat.template_process``: renders chat templates in turn, until its input ends.

Templates come with models, which come from anywhere. The sandbox keeps a template from running Python code, but not
from computing ``'x' * 10**9`` or looping forever. It therefore runs in a guarded process.
"""

import msgspec

from caravan_dialects.chat.template_environment import compiled, names_in, usual_variables
from caravan_dialects.chat.template_messages import RenderReply, RenderRequest
from caravan_dialects.guarded_process import limit_process, serve

# Limit of the address space, which includes Python and jinja2 (about 60 MB).
MEMORY_BYTES = 512 << 20
_PROBLEM_CHARACTERS = 500

_DECODER = msgspec.json.Decoder(RenderRequest)


def render(request: RenderRequest) -> RenderReply:
    """Render one template. Whatever it raises becomes the ``problem`` of the reply."""
    pieces: list[str] = []
    size = 0
    try:
        if request.names:
            return RenderReply(names=names_in(request.source))
        for piece in compiled(request.source).generate(usual_variables(request.variables)):
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


if __name__ == "__main__":
    limit_process(MEMORY_BYTES)
    serve(lambda request: msgspec.json.encode(render(_DECODER.decode(request))))
