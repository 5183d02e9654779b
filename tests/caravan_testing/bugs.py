"""Bugs in the scheduler: functions that raise an exception, and a simulation that goes on as the router does."""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import pytest

import caravan_scheduler
from caravan_scheduler import invariants, recovery
from caravan_scheduler.actions import Action, Fail, FailureReason, Faulted
from caravan_scheduler.events import Event
from caravan_testing.simulation import Simulation


class InjectedError(Exception):
    """What a function raises that has a bug."""


class FaultySimulation(Simulation):
    """Goes on after bugs, and notes them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.faults: list[Faulted] = []
        self.bug = Bug()
        self._begins_anew = False

    def handle(self, *events: Event) -> list[Action]:
        with self.bug.at_work():
            actions = recovery.handle(self.scheduler, events, self.now)
        self.actions += actions
        for action in actions:
            if not (isinstance(action, Fail) and action.request_id in self.cancelled):
                self._execute(action)
        if self._begins_anew:
            self._begins_anew = False
            assert not self.scheduler.shards
            lost = dict(self.shards)
            for name in lost:
                if name in self.shards:  # else a bug that was met meanwhile has lost it before
                    self.lose(name)
            for name, shard in lost.items():
                if name not in self.shards:
                    self.join(name, shard.limits, survived=True, runs=shard.runs)
        invariants.check(self.scheduler)
        return actions

    def _go_on(self, fault: Faulted) -> None:
        # What a bug has broken may raise exceptions of its own until the scheduler begins anew.
        assert isinstance(fault.error, InjectedError | RuntimeError) or self.faults, fault.error
        self.faults.append(fault)
        self._begins_anew = self._begins_anew or fault.is_rebuilt

    def check_failed(self) -> None:
        """Check that no request has failed but those that met a bug."""
        met = {request_id for fault in self.faults for request_id in fault.request_ids}
        failed = {key for key, reason in self.failed.items() if reason is FailureReason.FAULT}
        assert failed <= met, f"{failed - met} have failed, and have met no bug"
        for fault in self.faults:
            assert len({self._with_its_search(key)[0] for key in fault.request_ids}) <= 1, "several requests failed"


class Bug:
    """Raises an exception in the call number ``countdown`` of a function that is bugged, from 0; never if None.

    It counts calls within `at_work`.
    ``after``: at the end of the call, when the function has done what it does. ``raised_in``: its name.
    """

    def __init__(self) -> None:
        self.countdown: int | None = None
        self.after = False
        self.raised_in = ""
        self.called: set[str] = set()
        self._is_at_work = False

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count calls, and raise."""
        self._is_at_work = True
        try:
            yield
        finally:
            self._is_at_work = False

    def strikes(self, name: str) -> bool:
        """Whether the call of ``name`` raises an exception. Then no other call does."""
        if not self._is_at_work:
            return False
        self.called.add(name)
        if self.countdown is None:
            return False
        self.countdown -= 1
        if self.countdown >= 0:
            return False
        self.countdown = None
        self.raised_in = name
        return True


def modules(*packages: str) -> list[ModuleType]:
    """Return modules and packages of `caravan_scheduler` with all that they have."""
    found = []
    for package in packages:
        module = importlib.import_module(f"caravan_scheduler.{package}")
        found.append(module)
        inner = pkgutil.iter_modules(getattr(module, "__path__", ()), f"{module.__name__}.")
        found += [importlib.import_module(one.name) for one in inner]
    return found


def functions(found: Sequence[ModuleType]) -> dict[str, tuple[Any, str, FunctionType]]:
    """Return the functions and methods of modules by name: where each is, under which name there, and itself."""
    result: dict[str, tuple[Any, str, FunctionType]] = {}
    for module in found:
        for name, value in vars(module).items():
            if inspect.isfunction(value) and value.__module__ == module.__name__:
                result[f"{module.__name__}.{name}"] = (module, name, value)
            elif inspect.isclass(value) and value.__module__ == module.__name__:
                for own, method in vars(value).items():
                    function = method.fget if isinstance(method, property) else method
                    if inspect.isfunction(function) and not own.startswith("__") and function.__module__:
                        result[f"{module.__name__}.{name}.{own}"] = (value, own, function)
    return {name.removeprefix("caravan_scheduler."): one for name, one in result.items()}


@contextmanager
def bugged(bug: Bug, named: dict[str, tuple[Any, str, FunctionType]]) -> Iterator[None]:
    """Let ``bug`` strike in these functions, from wherever they are called."""
    everywhere = [
        importlib.import_module(one.name)
        for one in pkgutil.walk_packages(caravan_scheduler.__path__, "caravan_scheduler.")
    ]
    with pytest.MonkeyPatch.context() as patch:
        for name, (owner, own, function) in named.items():
            wrapped = _with_bug(bug, name, function)
            if isinstance(owner, ModuleType):
                for module in everywhere:
                    if vars(module).get(own) is function:
                        patch.setattr(module, own, wrapped)
            else:
                before = vars(owner)[own]
                patch.setattr(owner, own, property(wrapped) if isinstance(before, property) else wrapped)
        yield


def _with_bug(bug: Bug, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        strikes = bug.strikes(name)
        if strikes and not bug.after:
            raise InjectedError(name)
        result = function(*args, **kwargs)
        if strikes:
            raise InjectedError(name)
        return result

    return call
