"""The command `caravan-router`: HTTP in front of shards that run elsewhere."""

import asyncio
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop

from caravan_dialects.conversations.database import StateFileError
from caravan_proto.flags import load
from caravan_proto.telemetry import LogFileError, configure_logging
from caravan_proto.tls import TlsFileError
from caravan_router.accounting.audit_log import AuditLogError
from caravan_router.accounting.table import UsageFileError
from caravan_router.app import run_router
from caravan_router.auth.key_file import KeyFileError
from caravan_router.config import RouterConfig
from caravan_router.engine.fleet import Fleet
from caravan_router.http.metrics import MetricsPortError
from caravan_router.mcp.config import McpConfigError
from caravan_router.tracing.settings import TracingError
from caravan_studio.recording.recorder import RecordFileError

_log = logging.getLogger(__name__)

# Exceptions that `run_router` raises when the router cannot start with its configuration.
STARTUP_ERRORS = (
    KeyFileError,
    TlsFileError,
    McpConfigError,
    StateFileError,
    RecordFileError,
    UsageFileError,
    AuditLogError,
    TracingError,
    LogFileError,
    MetricsPortError,
    OSError,
)


def startup_problem(config: RouterConfig, error: Exception) -> str:
    """Return one of STARTUP_ERRORS as a message for the user."""
    match error:
        case KeyFileError():
            return f"--api-keys-file: {error}"
        case StateFileError():
            return f"{'--state-url' if config.state_url else '--state-file'}: {error}"
        case UsageFileError():
            return f"--usage-file: {error}"
        case AuditLogError():
            return f"--audit-log: {error}"
        case RecordFileError():
            return f"--record: {error}"
        case TlsFileError() | McpConfigError() | TracingError() | LogFileError() | MetricsPortError():
            return str(error)
        case _:
            return f"cannot listen on {config.hostname}:{config.port}: {getattr(error, 'strerror', None) or error}"


def stop_on_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set. A second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if number == signal.SIGINT:
            _log.info("ending once running requests have finished; press Ctrl-C again to end at once")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def _run(config: RouterConfig) -> None:
    def on_listening(_fleet: Fleet, url: str) -> None:
        _log.info("listening", extra={"url": url, "shards": len(config.shard)})

    await run_router(config, stop_on_signals(), on_listening)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the router until a signal. Return 0, or 2 if it cannot start with these flags."""
    config = load(RouterConfig, prog="caravan-router", description=__doc__ or "", argv=argv)
    if not config.shard:
        sys.stderr.write("caravan-router: error: no shard given: pass --shard ADDRESS, or use `caravan serve`\n")
        return 2
    try:
        configure_logging(config.logging)
        uvloop.run(_run(config))
    except STARTUP_ERRORS as error:
        sys.stderr.write(f"caravan-router: error: {startup_problem(config, error)}\n")
        return 2
    return 0
