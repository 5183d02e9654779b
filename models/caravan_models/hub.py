"""Names what a hub, or the way to it, answered instead of what was asked for."""

import errno
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    DisabledRepoError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import build_hf_headers

import caravan_proto
from caravan_models.cache_layout import cache_folder
from caravan_models.cached_model import demo_file
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.listing import RepositoryFile
from caravan_models.reference import HubModel
from caravan_models.transfer import Patience

_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
# Hubs count downloads by it.
_LIBRARY = "caravan"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# A path of a listing becomes a path here, so it must not lead out of its folder.
_UNSAFE = re.compile(r"(^|/)\.{1,2}(/|$)|^/|//|[\\\x00-\x1f]|^$")


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
            return network_failure(error, endpoint)


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


def network_failure(error: Exception, endpoint: str) -> FetchError:
    """Return what to tell if a server cannot be reached, or answers with nothing of use."""
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


Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings(Patience):
    """Where a hub is and where its files go, by default as huggingface_hub's variables of the environment say.

    ``demo_file``: the demo model, if it is here.
    """

    endpoint: str = field(default_factory=lambda: constants.ENDPOINT)
    cache: Path = field(default_factory=cache_folder)
    token: str | None = field(default_factory=get_token)
    offline: bool = field(default_factory=constants.is_offline_mode)
    demo_file: Path | None = field(default_factory=demo_file)

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.endpoint)
            valid = (
                parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
            )
        except ValueError:
            valid = False
        if not valid:
            raise FetchError(
                FetchProblem.NO_HUB,
                f"HF_ENDPOINT must be a URL such as https://huggingface.co. Given: {self.endpoint!r}",
            )


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a repository at one commit."""

    commit: str
    files: tuple[RepositoryFile, ...]


class Hub:
    """Asks one hub. Every call blocks, and raises FetchError."""

    def __init__(self, settings: HubSettings) -> None:
        self.settings = settings
        # Not only the default of its parameter: without a token, none of the user's may be sent.
        self._token = settings.token or False
        self._api = HfApi(
            endpoint=settings.endpoint,
            token=self._token,
            library_name=_LIBRARY,
            library_version=caravan_proto.__version__,
        )

    def listing(self, reference: HubModel) -> Listing:
        """Return the files of the repository at the revision."""

        def ask() -> ModelInfo:
            return self._api.model_info(
                reference.repository,
                revision=reference.revision,
                files_metadata=True,
                timeout=self.settings.silence_s,
            )

        info = self._repeated(reference, ask)
        if info.sha is None or not _COMMIT.fullmatch(info.sha):
            raise FetchError(
                FetchProblem.NO_HUB,
                f"{self.settings.endpoint} names no commit of {reference.repository}; check HF_ENDPOINT",
            )
        siblings = info.siblings or []
        return Listing(info.sha, tuple(file for file in map(_file, siblings) if not _UNSAFE.search(file.path)))

    def _repeated(self, reference: HubModel, ask: Callable[[], Result]) -> Result:
        """Return the result of ``ask``; try again after failures that pass."""
        for attempt in range(self.settings.tries):
            try:
                return ask()
            except OfflineModeIsEnabled as error:
                raise failure_of(error, reference, self.settings.endpoint) from error
            except (HfHubHTTPError, httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
                if attempt == self.settings.tries - 1 or not is_passing(error):
                    raise failure_of(error, reference, self.settings.endpoint) from error
                self.settings.pause(attempt)
            except (ValueError, TypeError, KeyError) as error:
                # What came is no JSON, or not of a hub's form.
                raise FetchError(
                    FetchProblem.NO_HUB,
                    f"{self.settings.endpoint} does not answer as a hub does; check HF_ENDPOINT, and the proxy if "
                    "there is one",
                ) from error
        raise AssertionError("the last try returns or raises")

    def url(self, reference: HubModel, commit: str, path: str) -> str:
        """Return where a file is."""
        return hf_hub_url(reference.repository, path, revision=commit, endpoint=self.settings.endpoint)

    def headers(self) -> dict[str, str]:
        """Return what a request for a file has to have. No compression: ranges count the bytes of the file."""
        own = build_hf_headers(token=self._token, library_name=_LIBRARY, library_version=caravan_proto.__version__)
        return {**own, "accept-encoding": "identity"}


def _file(sibling: RepoSibling) -> RepositoryFile:
    """Return a row of a listing. Its ``etag`` is empty if the hub names none that could be checked."""
    etag = sibling.blob_id or ""
    size = sibling.size or 0
    if sibling.lfs is not None:
        etag, size = sibling.lfs.sha256 or "", sibling.lfs.size
    return RepositoryFile(sibling.rfilename, size, etag if _ETAG.fullmatch(etag) else "")
