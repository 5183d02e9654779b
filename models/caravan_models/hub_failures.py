"""Names what a hub, or the way to it, answered instead of what was asked for."""

import errno
import ssl

import httpx2
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from caravan_models.errors import FetchError, FetchProblem
from caravan_models.reference import HubModel

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND, _TOO_MANY = 401, 403, 404, 429
_INVALID_TOKEN = "invalid credentials"


def is_passing(error: Exception) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _PASSING
    return isinstance(error, httpx2.TransportError) and not _is_lasting(error)


def _is_lasting(error: httpx2.TransportError) -> bool:
    """Whether nobody listens, the name is unknown, or the certificate is not trusted: that does not pass in seconds."""
    return isinstance(error, httpx2.ConnectError | httpx2.UnsupportedProtocol | httpx2.ProxyError)


def failure_of(error: Exception, reference: HubModel, endpoint: str) -> FetchError:
    """Return what to tell of an exception of huggingface_hub or its HTTP client."""
    match error:
        case OfflineModeIsEnabled():
            return FetchError(
                FetchProblem.NOT_CACHED,
                f"{reference.name} is not in the cache, and HF_HUB_OFFLINE is set; unset it, or run `caravan pull "
                f"hf:{reference.name}` where there is a network",
            )
        case HfHubHTTPError():
            return _of_status(error, reference, endpoint)
        case OSError() if error.errno == errno.ENOSPC:
            return FetchError(FetchProblem.DISK_FULL, f"the disk is full: {error}")
        case _:
            return _of_network(error, endpoint)


def _of_status(error: HfHubHTTPError, reference: HubModel, endpoint: str) -> FetchError:
    status, repository = error.response.status_code, reference.repository
    said = error.server_message or error.response.headers.get("x-error-message") or ""
    match error:
        case GatedRepoError():
            return FetchError(
                FetchProblem.GATED,
                f"{repository} is gated: accept its terms at {endpoint}/{repository}, then set HF_TOKEN to a token of "
                "that account",
            )
        case DisabledRepoError():
            return FetchError(FetchProblem.REFUSED, f"{repository} is disabled by {endpoint}; choose another one")
        case RevisionNotFoundError():
            return FetchError(
                FetchProblem.NO_REVISION,
                f"{repository} has no revision {reference.revision}; see {endpoint}/{repository}, or leave out what "
                "follows the @",
            )
        case RemoteEntryNotFoundError():
            return FetchError(FetchProblem.NO_FILE, f"{repository} no longer has the file; try again")
        case _ if status == _UNAUTHORIZED and _INVALID_TOKEN in said.lower():
            return FetchError(
                FetchProblem.BAD_TOKEN,
                f"{endpoint} does not know the token; set HF_TOKEN to a valid one, or unset it and remove the one that "
                "`hf auth login` has saved",
            )
        case _ if isinstance(error, RepositoryNotFoundError) or status in {_UNAUTHORIZED, _NOT_FOUND}:
            return FetchError(
                FetchProblem.NO_REPOSITORY,
                f"{endpoint} has no repository {repository}, or it is private; check the name, and set HF_TOKEN if it "
                "is private",
            )
        case _ if status == _FORBIDDEN:
            return FetchError(
                FetchProblem.REFUSED,
                f"{endpoint} refuses {repository} to this token (403{': ' + said if said else ''}); set HF_TOKEN to "
                "one that may read it",
            )
        case _ if status == _TOO_MANY:
            return FetchError(
                FetchProblem.TOO_MANY_REQUESTS,
                f"{endpoint} has had too many requests from here (429); wait some minutes, or set HF_TOKEN for a "
                "higher limit",
            )
        case _:
            return FetchError(
                FetchProblem.HUB_FAILS, f"{endpoint} fails with status {status}; try again later, nothing is lost"
            )


def _of_network(error: Exception, endpoint: str) -> FetchError:
    if isinstance(error, httpx2.TooManyRedirects):
        return FetchError(FetchProblem.NO_HUB, f"{endpoint} redirects in a circle; check HF_ENDPOINT")
    if isinstance(error, httpx2.UnsupportedProtocol | httpx2.InvalidURL):
        return FetchError(FetchProblem.NO_HUB, f"{endpoint} leads to a URL that cannot be opened; check HF_ENDPOINT")
    if isinstance(error.__cause__, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(error):
        return FetchError(
            FetchProblem.NO_NETWORK,
            f"the certificate of {endpoint} is not trusted; set SSL_CERT_FILE to the authority that signed it",
        )
    reason = "it does not answer in time" if isinstance(error, httpx2.TimeoutException) else str(error)
    return FetchError(
        FetchProblem.NO_NETWORK,
        f"cannot reach {endpoint}: {reason or type(error).__name__}; check the network and HTTPS_PROXY, or serve a "
        "file that is here",
    )
