"""Logs that a database went away and came back: once each, however many calls fail meanwhile."""

import logging
import time

from caravan_dialects.sql.connection import PostgresError

_log = logging.getLogger(__name__)


def is_away(error: BaseException | None) -> bool:
    """Return whether the database could not be reached, which may pass."""
    return isinstance(error, PostgresError) and error.is_away


class Outage:
    """The time during which a database cannot be reached. ``what``: what it keeps."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._since: float | None = None

    def failed(self, error: Exception) -> bool:
        """Note that a call failed. Return whether the database is away, which is logged here."""
        if not is_away(error):
            return False
        if self._since is None:
            self._since = time.monotonic()
            _log.error("%s cannot be read or written, the database is away: %s", self._what, error)
        return True

    def worked(self) -> None:
        """Note that a call succeeded."""
        if self._since is not None:
            away_s = time.monotonic() - self._since
            self._since = None
            _log.warning("%s can be read and written again, the database was away for %.1f s", self._what, away_s)
