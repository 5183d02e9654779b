"""A hub's API, through huggingface_hub: what a repository has, and what to send when its files are asked for."""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.hf_api import ModelInfo, RepoSibling
from huggingface_hub.utils import build_hf_headers

import caravan_proto
from caravan_models.cache_folder import cache_folder
from caravan_models.demo_model import demo_file
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.hub_failures import failure_of, is_passing
from caravan_models.listing import RepositoryFile
from caravan_models.reference import HubModel

# Hubs count downloads by it.
_LIBRARY = "caravan"
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# A path of a listing becomes a path here, so it must not lead out of its folder.
_UNSAFE = re.compile(r"(^|/)\.{1,2}(/|$)|^/|//|[\\\x00-\x1f]|^$")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSettings:
    """Where a hub is and where its files go, by default as huggingface_hub's variables of the environment say.

    ``demo_file``: the demo model, if it is here. ``silence_s``: seconds without a byte after which a connection counts
    as lost. ``pause_s``: before the first of ``tries`` that follow a failed one; each pause is twice as long as the one
    before.
    """

    endpoint: str = field(default_factory=lambda: constants.ENDPOINT)
    cache: Path = field(default_factory=cache_folder)
    token: str | None = field(default_factory=get_token)
    offline: bool = field(default_factory=constants.is_offline_mode)
    demo_file: Path | None = field(default_factory=demo_file)
    silence_s: float = 30.0
    pause_s: float = 1.0
    tries: int = 6

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

    def pause(self, attempt: int) -> None:
        """Wait after try number ``attempt``, counted from 0, has failed."""
        time.sleep(self.pause_s * 2**attempt)


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
