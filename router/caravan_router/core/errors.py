"""The errors that a caller of the engine must expect."""


class EngineError(Exception):
    """Base of the engine's errors.

    EngineError
     +-- NoShardError         no shard is up: nothing could be tried (503)
     +-- GenerationError      a started generation could not continue (424)
     |    +-- IncompleteGenerationError   its stream ended without a finish reason (500)
     +-- TextTooLongError     more text than the shard tokenizes (422)
     +-- QueueTimeoutError    it waited too long for its turn (429)
     +-- DeadlineError        it did not end in the time its client gave it (504)
    """


class NoShardError(EngineError):
    """No shard is up."""

    def __init__(self, reason: str = "no shard is up") -> None:
        super().__init__(reason)


class GenerationError(EngineError):
    """A started generation could not go on."""


class IncompleteGenerationError(GenerationError):
    """The token stream ended without a finish reason."""


class TextTooLongError(EngineError):
    """More text than the shard tokenizes in one call."""


class QueueTimeoutError(EngineError):
    """It waited too long for its turn."""


class DeadlineError(EngineError):
    """It did not end in the time its client gave it."""
