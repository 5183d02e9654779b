"""A model with calls that block: vLLM's ``LLM``, over Caravan's scheduler and llama.cpp."""

import weakref
from pathlib import Path
from typing import Unpack

from caravan.calls import BlockingCalls
from caravan.chat_call import Messages, SessionOptions
from caravan.chat_session import ChatSession, new_session, read_session
from caravan.model_calls import ModelCalls
from caravan.opened import OpenedModel
from caravan.options import ModelOptions, ServerOptions
from caravan.server import Server
from caravan.twins import blocking

# Nobody waits for the next token of a list of prompts, so that steps may have larger chunks of prompts. For 64 prompts
# of 100 words and 64 tokens each, that is 3 to 6 % faster than the default of a server.
_TARGET_ITL_MS = 1000.0


class LLM(BlockingCalls[ModelCalls]):
    """A GGUF model in this process. Use it as a context manager, or `close` it; else it ends with the program.

    All prompts of all calls are batched continuously, as by ``caravan serve``. Any thread may call; each call blocks
    its own thread only. An exception in a call, Ctrl-C among them, ends the generations of that call and no others.

    Every generating call raises RequestError if a prompt or a parameter breaks a rule, in which case nothing has run,
    GenerationError if a generation could not continue, and ClosedError if the model is closed.
    """

    def __init__(self, model: str | Path, **options: Unpack[ModelOptions]) -> None:
        """Load ``model``, a GGUF file or a name as in docs/models.md, which may be downloaded first.

        By default prompts of a list are prefilled fast (``target_itl_ms=1000``).

        Raises ModelError, and TypeError or ValueError if an option is wrong.
        """
        self._opened = OpenedModel(model, {"target_itl_ms": _TARGET_ITL_MS} | options)
        super().__init__(ModelCalls(self._opened), self._opened.loop)
        # Also at the end of the program.
        self._close = weakref.finalize(self, self._opened.close)

    def close(self) -> None:
        """End what runs, and free the model. Closing it again does nothing."""
        self._close()

    embed = blocking(ModelCalls.embed)
    score = blocking(ModelCalls.score)
    tokenize = blocking(ModelCalls.tokenize)
    detokenize = blocking(ModelCalls.detokenize)
    apply_chat_template = blocking(ModelCalls.apply_chat_template)

    def chat_session(self, messages: Messages = (), **options: Unpack[SessionOptions]) -> ChatSession:
        """Return a conversation that keeps its turns; it begins with ``messages``, after a message of the ``system``.

        ``tools``, ``chat_template_kwargs`` and ``adapter`` are those of all turns: see `chat`.
        """
        return ChatSession(self, new_session(messages, options))

    def load_chat_session(self, saved: str | Path | bytes) -> ChatSession:
        """Return the session that `ChatSession.save` saved, from its bytes or its file. Raises StateError, OSError.

        With another model it has the same messages, whose tokens are then computed anew.
        """
        return ChatSession(self, read_session(saved))

    def serve(self, **options: Unpack[ServerOptions]) -> Server:
        """Serve the model over HTTP too, until the server is stopped or the model is closed.

        Raises ServerError if it cannot be started, and TypeError or ValueError if an option is wrong.
        """
        # Not the loop's own method, since a server keeps the model open.
        return Server(lambda work: self._loop.run(work), lambda: self._opened.local.serve(options))
