"""What ``--with FLAG=VALUE`` changes of a scheduler's recorded configuration."""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Protocol

from caravan_proto.flags import add_flags, resolve
from caravan_scheduler.config import SchedulerConfig

# The flags of a router that its scheduler has, each with its value in a configuration; None: it is not given.
_FLAGS: Mapping[str, Callable[[SchedulerConfig], object]] = MappingProxyType(
    {
        "prefill-mode": lambda config: config.mode.value,
        "target-itl-ms": lambda config: 1000 * config.target_itl_s,
        "waiting-served-ratio": lambda config: config.waiting_served_ratio,
        "max-waiting-tokens": lambda config: config.max_waiting_tokens,
        "max-batch-prefill-tokens": lambda config: config.max_batch_prefill_tokens,
        "max-batch-total-tokens": lambda config: config.max_batch_total_tokens,
        "max-batch-size": lambda config: config.max_batch_size,
        "prefix-caching": lambda config: "on" if config.prefix_caching else "off",
        "kv-watermark": lambda config: config.watermark,
        "priority-aging-s": lambda config: config.aging_s,
        "max-request-losses": lambda config: config.max_fatal_losses,
        "shard-grace-s": lambda config: config.no_shard_grace_s,
        "queue-timeout-s": lambda config: None if config.queue_timeout_s == math.inf else config.queue_timeout_s,
    }
)


class SchedulerFlags(Protocol):
    """The flags of a program that has a scheduler, as `caravan_proto.flags` reads them: those of the router."""

    @property
    def scheduler(self) -> SchedulerConfig: ...


class ChangeError(Exception):
    """A change that cannot be made."""


def changed(config: SchedulerConfig, changes: Sequence[str], router: type[SchedulerFlags]) -> SchedulerConfig:
    """Return ``config`` with other values of flags of ``router``, each given as FLAG=VALUE. Raises ChangeError."""
    given = [change.removeprefix("--").partition("=") for change in changes]
    for flag, equals, _ in given:
        if flag not in _FLAGS:
            raise ChangeError(f"--with knows the flags of the scheduler: {', '.join(_FLAGS)}. Given: {flag!r}")
        if not equals:
            raise ChangeError(f"--with needs FLAG=VALUE. Given: {flag!r}")
    known = [f"--{flag}={value}" for flag, of in _FLAGS.items() if (value := of(config)) is not None]
    before, after = _parse(router, known), _parse(router, [*known, *(f"--{flag}={value}" for flag, _, value in given)])
    names = [field.name for field in fields(SchedulerConfig)]
    # The recorded value of what does not change stays as it is, to the last bit.
    different = [name for name in names if getattr(before, name) != getattr(after, name)]
    return replace(config, **{name: getattr(after, name) for name in different})


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ChangeError(f"--with: {message}")


def _parse(router: type[SchedulerFlags], argv: list[str]) -> SchedulerConfig:
    parser = _Parser(prog="caravan replay", add_help=False)
    add_flags(parser, router)
    return resolve(parser, router, parser.parse_args(argv), {}).scheduler
