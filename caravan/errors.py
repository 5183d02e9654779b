"""The errors that users of the package must expect."""

from typing import Self


class CaravanError(Exception):
    """Base of the errors of this package.

    CaravanError
     +-- ModelError          the model cannot be opened as asked
     +-- RequestError        a prompt or a parameter breaks a rule: nothing was computed (also a ValueError)
     |    +-- ContextLengthError  the prompt, or the prompt and its output, does not fit the model's context
     +-- GenerationError     a generation that had started could not continue
     |    +-- DeadlineError  it did not end within its timeout (also a TimeoutError)
     |    +-- LogitsProcessorError  a function of its logits has failed; its error is the cause
     +-- ServerError         the server cannot be started as asked
     +-- ClosedError         the model, the executor or the client is closed, or the model has failed
     |    +-- ForkedError    a child process after fork uses what its parent has opened
     +-- WrongThreadError    a thread uses an executor that another one made
     +-- ConversationError   a call does not fit the state of a conversation: nothing has changed
     |    +-- AlreadyPrompted    it waits for `Executor.infer` with earlier tokens
     |    +-- NeedsInfer         it has tokens that `Executor.infer` has not computed yet
     |    +-- NeedsPrompt        it has no logits: it is new, or was cut back
     |    +-- ConversationEnded  it was closed
     |    +-- TooLong            it would have more tokens than a sequence can hold
     |    +-- CacheFull          there is no room for the next token of `Conversation.generate`
     |    +-- ReplyUnderWay      a chat session is still being answered
     +-- StateError          a saved state is damaged, or belongs to another model

    `caravan.client` has those of a client, some of which are also a RequestError, GenerationError or DeadlineError.
    """


class ModelError(CaravanError):
    """The model cannot be opened as asked; the message says what to do."""


class ServerError(CaravanError):
    """The server cannot be started as asked; the message says why."""


class RequestError(CaravanError, ValueError):
    """A prompt or a parameter breaks a rule. Nothing was computed."""


class ContextLengthError(RequestError):
    """The prompt, or the prompt and its output, does not fit the model's context: make it shorter."""


class GenerationError(CaravanError, RuntimeError):
    """A generation that had started could not continue. ``request_id``: that of `LLMEngine.add_request`, else ""."""

    request_id: str = ""


class DeadlineError(GenerationError, TimeoutError):
    """The generation did not end within its ``timeout``."""


class LogitsProcessorError(GenerationError):
    """A function of `SamplingParams.logits_processors` raised or returned no logits; its error is ``__cause__``."""

    @classmethod
    def of(cls, error: BaseException) -> Self:
        """Return the error of a request of which a function has raised ``error``."""
        made = cls(f"a logits processor failed: {type(error).__name__}: {error}")
        made.__cause__ = error
        return made


class ClosedError(CaravanError, RuntimeError):
    """The model, the executor or the client is closed, or the model has failed: then the bug is ``__cause__``."""


class ForkedError(ClosedError):
    """A child process after ``os.fork`` uses a model, an executor or a client that its parent has opened."""


class WrongThreadError(CaravanError, RuntimeError):
    """An executor belongs to the thread that made it."""


class ConversationError(CaravanError, RuntimeError):
    """A call does not fit the state of a conversation. Nothing has changed."""


class AlreadyPrompted(ConversationError):
    """The conversation waits for `Executor.infer` with the tokens of an earlier prompt."""


class NeedsInfer(ConversationError):
    """The conversation has tokens that `Executor.infer` has not computed yet."""


class NeedsPrompt(ConversationError):
    """The conversation has no logits: it is new, or was cut back. Prompt it, then call `Executor.infer`."""


class ConversationEnded(ConversationError):
    """The conversation was closed."""


class TooLong(ConversationError):
    """The conversation would have more tokens than a sequence can hold."""


class CacheFull(ConversationError):
    """There is no room in the cache for the next token of `Conversation.generate`."""


class ReplyUnderWay(ConversationError):
    """The chat session is still being answered."""


class StateError(CaravanError, ValueError):
    """A saved state is damaged, or belongs to another model."""
