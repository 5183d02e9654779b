"""The errors that a caller of the engine must expect."""


class EngineError(Exception):
    """Base of the engine's errors.

    EngineError
     +-- NoShardError         no shard is up, so that nothing could be tried (503)
     +-- GenerationError      a started generation could not continue (424)
     |    +-- IncompleteGenerationError   its stream ended without a finish reason (500)
     +-- TextTooLongError     a text is longer than a shard tokenizes (422)
     +-- QueueTimeoutError    a request waited too long for its turn (429)
     +-- DeadlineError        a request did not end within its timeout (504)
    """


class NoShardError(EngineError):
    """No shard is up."""

    def __init__(self, reason: str = "no shard is up") -> None:
        super().__init__(reason)


class GenerationError(EngineError):
    """A started generation could not continue."""


class IncompleteGenerationError(GenerationError):
    """The token stream ended without a finish reason."""


class TextTooLongError(EngineError):
    """The text is longer than the shard tokenizes in one call."""


class QueueTimeoutError(EngineError):
    """The request waited too long for its turn."""


class DeadlineError(EngineError):
    """The request did not end within its timeout."""
