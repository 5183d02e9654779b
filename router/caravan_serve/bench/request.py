"""One request of the load, its stream and its result."""

from dataclasses import dataclass, field
from enum import StrEnum


class ErrorKind(StrEnum):
    """Why a request counts as failed. The values appear in the report."""

    OVERLOADED = "overloaded (429)"
    REFUSED = "refused (4xx)"
    SERVER = "server error (5xx)"
    STREAM = "error in the stream"
    CUT = "stream cut"
    SHORT = "fewer tokens than asked"
    TIMEOUT = "timeout"
    CONNECTION = "connection"


class TokenSource(StrEnum):
    """Where a token count comes from."""

    USAGE = "usage"
    EVENTS = "events"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRequest:
    """A prompt and the number of tokens that each of its ``n`` choices is to get."""

    prompt: str
    max_tokens: int
    n: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTokens:
    """How tokens are drawn at random, for all requests of a run. None leaves a filter to the server's default."""

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What all requests of a run ask for. Outputs are greedy if ``drawn`` is None.

    ``whole``: one reply at the end instead of a stream. ``logprobs``: number of likely tokens to tell with each token.
    ``schema``: a JSON schema that outputs keep, as JSON.
    """

    drawn: DrawnTokens | None = None
    whole: bool = False
    logprobs: int | None = None
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request failed: a kind to count, and the server's own message."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """Times are seconds on ``time.perf_counter``; ``token_times`` holds the arrival of each token, by choice.

    ``cached_tokens``: those of the prompt that the server already had; None if it does not say.

    ``failure`` is None for a request that delivered every token it asked for. ``ended_early`` marks a successful
    request that delivered fewer because its API cannot demand an exact length.
    """

    scheduled: float
    ended: float
    token_times: tuple[tuple[float, ...], ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    token_source: TokenSource = TokenSource.EVENTS
    ended_early: bool = False
    failure: Failure | None = None

    @property
    def first_token(self) -> float | None:
        """The arrival time of the first token of any choice."""
        return min((times[0] for times in self.token_times if times), default=None)


@dataclass(slots=True)
class StreamRecord:
    """What a stream has delivered so far. The caller may read it while the stream runs.

    ``texts``: the parts of each choice's text, for callers that set it to a dictionary.
    """

    token_times: dict[int, list[float]] = field(default_factory=dict)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    usage_tokens: int | None = None
    texts: dict[int, list[str]] | None = None
    error: str | None = None
    ended: bool = False

    def add_token(self, choice: int, when: float) -> None:
        """Note one token of ``choice``."""
        self.token_times.setdefault(choice, []).append(when)

    def add_text(self, choice: int, text: str) -> None:
        """Keep a part of the text of ``choice``, if the caller wants it."""
        if self.texts is not None:
            self.texts.setdefault(choice, []).append(text)

    def text_of(self, choice: int) -> str:
        """Return the text of ``choice`` so far."""
        return "".join((self.texts or {}).get(choice, ()))

    @property
    def event_tokens(self) -> int:
        """The number of tokens of all choices, counted by events."""
        return sum(len(times) for times in self.token_times.values())
