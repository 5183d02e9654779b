"""What each error becomes on the wire: its kind, its sentence, its headers, and its body in each dialect."""

from collections.abc import Callable
from dataclasses import dataclass

from caravan_dialects.api.errors import (
    RETRY_AFTER_S,
    BodyTimeoutError,
    BrokenBodyError,
    BudgetError,
    ContextLengthError,
    ErrorFamily,
    ErrorKind,
    InvalidKeyError,
    MalformedRequestError,
    MethodNotAllowedError,
    MissingKeyError,
    RateLimitedError,
    RequestError,
    UnknownModelError,
    UpgradeRequiredError,
)
from caravan_dialects.conversations.store import StoreError
from caravan_scheduler.core.errors import (
    AdapterUnloadedError,
    ConstraintFailedError,
    DeadlineError,
    FaultError,
    GenerationError,
    HelperError,
    IncompleteGenerationError,
    ModelReplacedError,
    NoShardError,
    QueueTimeoutError,
    TextTooLongError,
    TooMuchMediaError,
)
from caravan_scheduler.core.request_metrics import Failure

_CLIENT, _RATE, _SERVER = ErrorFamily.CLIENT, ErrorFamily.RATE, ErrorFamily.SERVER

_STORE = "Responses and conversations cannot be read or written, for example because the disk is full"
_REPLACED = "While the request waited, the model was replaced by another one of the same name with different tokens"
_FAULT = "The request hit a bug in the router; see its log"
_MEDIA = "The images and audio of all open requests together take too much memory"
_DEAD_END = "The output does not match the schema or grammar and has no valid continuation"
_HELPER = (
    "A process that renders templates, decodes files or checks constraints was killed or stopped, or got no CPU time"
)
_OTHERS: dict[type[Exception], ErrorKind] = {
    ContextLengthError: ContextLengthError.kind,
    TextTooLongError: ContextLengthError.kind,
    TooMuchMediaError: ErrorKind(429, "overloaded", _RATE, Failure.VALIDATION, RETRY_AFTER_S, _MEDIA),
    QueueTimeoutError: ErrorKind(429, "overloaded", _RATE, Failure.QUEUE_TIMEOUT, RETRY_AFTER_S),
    HelperError: ErrorKind(503, "helper_failed", _SERVER, Failure.GENERATION, RETRY_AFTER_S, _HELPER),
    DeadlineError: ErrorKind(504, "deadline_exceeded", _SERVER, Failure.DEADLINE),
    StoreError: ErrorKind(503, "store_unavailable", _SERVER, None, RETRY_AFTER_S, _STORE),
    ModelReplacedError: ErrorKind(503, "model_replaced", _SERVER, Failure.GENERATION, RETRY_AFTER_S, _REPLACED),
    AdapterUnloadedError: UnknownModelError.kind,
    NoShardError: ErrorKind(503, "no_shard", _SERVER, Failure.GENERATION, RETRY_AFTER_S, "No shard is up"),
    ConstraintFailedError: ErrorKind(500, "constraint_failed", _SERVER, Failure.GENERATION, None, _DEAD_END),
    IncompleteGenerationError: ErrorKind(500, "incomplete_generation", _SERVER, Failure.INCOMPLETE),
    GenerationError: ErrorKind(424, "generation", _SERVER, Failure.GENERATION),
    FaultError: ErrorKind(500, "internal", _SERVER, Failure.GENERATION, None, _FAULT),
}
# By the class of an error; the most specific one along its bases counts.
TABLE: dict[type[Exception], ErrorKind] = {kind: kind.kind for kind in RequestError.__subclasses__()} | _OTHERS
INTERNAL = ErrorKind(500, "internal", _SERVER, meaning="The router failed; see its log")


def kind_of(error: Exception) -> ErrorKind:
    """Return the entry of TABLE for ``error``, INTERNAL if there is none."""
    return next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), INTERNAL)


def message_of(error: Exception) -> str:
    """Return the sentence that clients see."""
    match error:
        case RequestError():
            return str(error)
        case TextTooLongError():
            # The words of three dialects: agents look for any of them.
            return f"Input validation error: the prompt is too long, it exceeds the context window: {error}"
        case StoreError():
            return "Responses and conversations cannot be read or written now"
        case ModelReplacedError():
            return f"The model {error.model} was replaced by another one while the request waited: send it again"
        case AdapterUnloadedError():
            return f"The model does not exist any more: {error}"
        case NoShardError():
            if error.told:
                return error.told
            return f"No shard of the model {error.model} is up" if error.model else "No shard is up"
        case TooMuchMediaError():
            return f"Model is overloaded: {error}"
        case QueueTimeoutError():
            return f"Model is overloaded: {error}"
        case HelperError():
            return str(error)
        case DeadlineError():
            return f"Deadline exceeded: {error}"
        case ConstraintFailedError():
            return (
                "The output cannot go on: after what was generated, its schema, grammar or regular expression lets "
                "nothing follow, or takes too much to follow"
            )
        case IncompleteGenerationError():
            return "Incomplete generation"
        case GenerationError():
            return f"Request failed during generation: {error}"
        case _:
            # The cause goes to the log only: it may name paths and hosts.
            return "Internal server error"


# llm-d's picker says so with its own refusals. Gateways read it whatever the dialect of the body.
REASON_HEADER = "x-llm-d-request-dropped-reason"
# The reasons of `tgi_request_failure` that say more than the type of the error does.
_NAMED = frozenset({Failure.OVERLOADED, Failure.RATE_LIMITED, Failure.QUEUE_TIMEOUT, Failure.DEADLINE})


def headers_of(error: Exception) -> dict[str, str]:
    """Return the response headers that belong to ``error``."""
    kind = kind_of(error)
    # Another try may succeed, here or elsewhere; of other errors the request itself is the reason.
    if kind.retry_after_s is None and kind.failure is not Failure.DEADLINE:
        return _own_headers_of(error)
    reason = kind.failure.value if kind.failure in _NAMED else kind.error_type
    return {REASON_HEADER: reason, **_own_headers_of(error)}


def _own_headers_of(error: Exception) -> dict[str, str]:
    match error:
        case RateLimitedError():
            return {"Retry-After": str(error.retry_after_s)}
        case BudgetError():
            # The packages of OpenAI and Anthropic would try again at once.
            return {"Retry-After": str(error.retry_after_s), "X-Should-Retry": "false"}
        case MissingKeyError():
            return {"WWW-Authenticate": "Bearer"}
        case InvalidKeyError():
            return {"WWW-Authenticate": 'Bearer error="invalid_token"'}
        case UpgradeRequiredError():
            return {"Upgrade": "websocket"}
        case MethodNotAllowedError():
            return {"Allow": error.allowed}
        case _:
            retry_after_s = kind_of(error).retry_after_s
            return {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}


def ends_connection(error: Exception) -> bool:
    """Return whether the rest of the connection's bytes cannot be read as a request, or are those of this one."""
    return isinstance(error, MalformedRequestError | BrokenBodyError | BodyTimeoutError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One API family: TGI's, OpenAI's, Ollama's, Anthropic's, Google's.

    ``status`` returns the HTTP status of an error, ``body`` its JSON body of type ``envelope``; its second argument is
    the id of the request, "" if it has none. ``id_header``: header in which clients look for that id, beside the one
    that every reply has. ``key_parameter``: the parameter of a URL in which clients may send their key.
    """

    name: str
    envelope: type
    status: Callable[[ErrorKind], int]
    body: Callable[[Exception, str], bytes]
    id_header: str | None = None
    key_parameter: str | None = None
