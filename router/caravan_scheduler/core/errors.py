"""The errors that a caller of the engine must expect."""


class EngineError(Exception):
    """Base of the engine's errors.

    EngineError
     +-- NoShardError         no shard is up, so that nothing could be tried (503)
     |    +-- ModelReplacedError   other weights of the same name replaced the model (503)
     +-- AdapterUnloadedError the adapter of the request was unloaded (404)
     +-- GenerationError      a started generation could not continue (424)
     |    +-- ConstraintFailedError       its output does not match its constraint and cannot go on (500)
     |    +-- IncompleteGenerationError   its stream ended without a finish reason (500)
     +-- FaultError           the request has met a bug of the router (500)
     +-- TextTooLongError     a text is longer than a shard tokenizes (422)
     +-- TooMuchMediaError    media of all requests together take too much memory (429)
     +-- QueueTimeoutError    a request waited too long for its turn (429)
     +-- DeadlineError        a request did not end within its timeout (504)
     +-- HelperError          a process that helps the server was killed or stopped, twice (503)
    """


class NoShardError(EngineError):
    """No shard of ``model`` is up; "" if it is not known which models there are.

    ``told``: the sentence that clients see, if it is not the usual one.
    """

    def __init__(self, reason: str = "no shard is up", *, model: str = "", told: str = "") -> None:
        super().__init__(reason)
        self.model = model
        self.told = told


class ModelReplacedError(NoShardError):
    """Other weights took over the name of ``model``, and the tokens of the request mean nothing to them."""

    def __init__(self, model: str) -> None:
        super().__init__("the model was replaced", model=model)


class AdapterUnloadedError(EngineError):
    """The adapter was unloaded before the request was queued, or other bytes took its place on a shard."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the adapter {name} was unloaded")


class GenerationError(EngineError):
    """A generation that had started could not continue."""


class ConstraintFailedError(GenerationError):
    """The output does not match its constraint and cannot go on: the grammar has a dead end, or takes too much."""


class IncompleteGenerationError(GenerationError):
    """The token stream ended without a finish reason."""


class FaultError(EngineError):
    """The request has met a bug of the router, which was logged."""


class TextTooLongError(EngineError):
    """The text is longer than the shard tokenizes in one call."""


class TooMuchMediaError(EngineError):
    """The pictures and sounds of all open requests would take ``given_bytes``, more than ``limit_bytes``."""

    def __init__(self, limit_bytes: int, given_bytes: int) -> None:
        super().__init__(f"media of open requests may take {limit_bytes} bytes. Given: {given_bytes}")
        self.limit_bytes = limit_bytes
        self.given_bytes = given_bytes


class QueueTimeoutError(EngineError):
    """The request waited in the queue for too long."""


class DeadlineError(EngineError):
    """The request did not end within its `timeout`."""


class HelperError(EngineError):
    """A process that helps the router or a shard failed, and not because of the request."""
