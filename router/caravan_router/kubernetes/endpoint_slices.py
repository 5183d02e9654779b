"""EndpointSlices, as far as they tell which pods of a Service are there. Nothing here needs a network.

https://kubernetes.io/docs/reference/kubernetes-api/service-resources/endpoint-slice-v1/
"""

from collections.abc import Iterable

import msgspec


class Conditions(msgspec.Struct, frozen=True):
    """``ready`` that is None means true, and ``terminating`` that is None false."""

    ready: bool | None = None
    terminating: bool | None = None


class Endpoint(msgspec.Struct, frozen=True):
    """A pod. All of its addresses lead to it, and the first one is enough."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions = Conditions()


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of a slice, or of a list of them, which is not complete while ``next_page`` is not empty."""

    name: str = ""
    resource_version: str = ""
    next_page: str = msgspec.field(default="", name="continue")


class EndpointSlice(msgspec.Struct, frozen=True):
    """Some of the pods of a Service, of one family of addresses."""

    metadata: Metadata
    endpoints: tuple[Endpoint, ...] | None = None


class SliceList(msgspec.Struct, frozen=True):
    """The answer to a list."""

    metadata: Metadata
    items: tuple[EndpointSlice, ...] = ()


class KnownPods:
    """The addresses of a Service's pods, ``ip:port``.

    A pod is there from when it is first ready until it terminates or its slice lacks it: its readiness in between is
    for the router to judge, which notices sooner whether a shard answers.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._slices: dict[str, EndpointSlice] = {}
        self.addresses: frozenset[str] = frozenset()
        # Those of pods that are ending.
        self.terminating: frozenset[str] = frozenset()

    def replace(self, slices: Iterable[EndpointSlice]) -> None:
        """Note all slices that there are."""
        self._slices = {one.metadata.name: one for one in slices}
        self._update()

    def put(self, changed: EndpointSlice) -> None:
        """Note a slice that is new or has changed."""
        self._slices[changed.metadata.name] = changed
        self._update()

    def remove(self, deleted: EndpointSlice) -> None:
        """Note that a slice is gone."""
        self._slices.pop(deleted.metadata.name, None)
        self._update()

    def _update(self) -> None:
        pods = [pod for one in self._slices.values() for pod in one.endpoints or () if pod.addresses]
        ending = {self._address(pod) for pod in pods if pod.conditions.terminating}
        staying = {self._address(pod) for pod in pods} - ending
        ready = {self._address(pod) for pod in pods if pod.conditions.ready is not False}
        self.terminating = frozenset(ending)
        self.addresses = frozenset(staying & (ready | self.addresses))

    def _address(self, pod: Endpoint) -> str:
        host = pod.addresses[0]
        return f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
