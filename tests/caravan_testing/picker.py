"""A stand-in for the endpoint picker of llm-d, which knows of a server only what that documents.

It reads labels of pods, metrics by the names of an engine's configuration, and the route that renders a prompt; it
sends the headers of a gateway, and reads a header of refusals. Its scores are simple: what they need must be there.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import ClientSession
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
ENGINE_LABEL = "llm-d.ai/engine-type"
DROPPED_REASON = "x-llm-d-request-dropped-reason"
_SPEC = re.compile(r"([\w:]+)(?:{(.*)})?")


def engine_configs() -> dict[str, dict[str, str]]:
    """Return the configurations of engines in ``deploy/platforms/llm-d.yaml`` by their names."""
    plugins = msgspec.yaml.decode((_DEPLOY / "platforms/llm-d.yaml").read_bytes())["plugins"]
    (plugin,) = (one for one in plugins if one["type"] == "core-metrics-extractor")
    return {config.pop("name"): config for config in plugin["parameters"]["engineConfigs"]}


def router_pod_labels() -> dict[str, str]:
    """Return the labels of a router's pod, as the chart renders them."""
    for text in (_DEPLOY / "kubernetes/cpu-minimal.yaml").read_text().split("\n---\n"):
        found = msgspec.yaml.decode(text)
        if found and found["kind"] == "Deployment":
            labels: dict[str, str] = found["spec"]["template"]["metadata"]["labels"]
            return labels
    raise AssertionError("no Deployment")


@dataclass(frozen=True, slots=True)
class Load:
    """What the metrics of a pod say."""

    queued: int
    running: int
    kv_use: float
    block_tokens: int
    blocks: int
    adapters: frozenset[str]
    max_adapters: int


@dataclass(slots=True)
class Pod:
    """A member of the pool. ``prefixes``: hashes of the blocks of prompts that went there, the newest last."""

    url: str
    labels: Mapping[str, str]
    prefixes: dict[int, None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Routed:
    """What became of a request. ``dropped``: why it was refused, "" if it was not."""

    pod: Pod
    status: int
    body: Any
    dropped: str


class Picker:
    """Routes requests among ``pods``, which it asks for their load before each."""

    def __init__(self, session: ClientSession, pods: Sequence[Pod]) -> None:
        self._session = session
        self.pods = pods
        self._engines = engine_configs()

    async def load(self, pod: Pod) -> Load:
        """Read the metrics of ``pod`` by the names of its engine."""
        specs = self._engines[pod.labels[ENGINE_LABEL]]
        async with self._session.get(f"{pod.url}/metrics") as reply:
            page = await reply.text()
        samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
        cache, lora = (_latest(samples, specs[name]) for name in ("cacheInfoSpec", "loraSpec"))
        return Load(
            queued=int(_value(samples, specs["queuedRequestsSpec"])),
            running=int(_value(samples, specs["runningRequestsSpec"])),
            kv_use=_value(samples, specs["kvUsageSpec"]),
            block_tokens=int(cache["block_size"]) if cache else 0,
            blocks=int(cache["num_gpu_blocks"]) if cache else 0,
            adapters=frozenset(filter(None, lora["running_lora_adapters"].split(","))) if lora else frozenset(),
            max_adapters=int(lora["max_lora"]) if lora else 0,
        )

    async def send(self, chat: Mapping[str, Any], **headers: str) -> Routed:
        """Send a chat to the pod that is best for it. ``headers``: the gateway's, with ``_`` for ``-``."""
        loads = [await self.load(pod) for pod in self.pods]
        blocks = await self._blocks(chat, loads[0].block_tokens)

        def score(index: int) -> float:
            load, pod = loads[index], self.pods[index]
            cached = next((number for number, block in enumerate(blocks) if block not in pod.prefixes), len(blocks))
            share = cached / len(blocks) if blocks else 0.0
            most = max(other.queued + other.running for other in loads)
            idle = 1 - (load.queued + load.running) / most if most else 1.0
            return 2 * share + idle + (1 - load.kv_use) + 2 * (chat.get("model") in load.adapters)

        best = max(range(len(self.pods)), key=score)
        pod = self.pods[best]
        pod.prefixes |= dict.fromkeys(blocks)
        while len(pod.prefixes) > loads[best].blocks:
            del pod.prefixes[next(iter(pod.prefixes))]
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self._session.post(f"{pod.url}/v1/chat/completions", json=chat, headers=named) as reply:
            return Routed(pod, reply.status, await reply.json(), reply.headers.get(DROPPED_REASON, ""))

    async def _blocks(self, chat: Mapping[str, Any], block_tokens: int) -> list[int]:
        """Return the hash of each full block of the prompt, which stands for all tokens before it too."""
        async with self._session.post(f"{self.pods[0].url}/v1/chat/completions/render", json=chat) as reply:
            tokens = (await reply.json())["token_ids"]
        ends = range(block_tokens, len(tokens) + 1, block_tokens) if block_tokens else ()
        return [hash((chat.get("model"), *tokens[:end])) for end in ends]


def _value(samples: Sequence[Sample], spec: str) -> float:
    name, labels = _parsed(spec)
    return next(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


def _latest(samples: Sequence[Sample], spec: str) -> Mapping[str, str] | None:
    """Return the labels of the sample of the greatest value; None without one."""
    name, labels = _parsed(spec)
    found = [sample for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
    return max(found, key=lambda sample: sample.value).labels if found else None


def _parsed(spec: str) -> tuple[str, dict[str, str]]:
    """Read ``name{label="value"}``."""
    match = _SPEC.fullmatch(spec)
    assert match is not None, spec
    return match[1], dict(re.findall(r'(\w+)="?([^",]*)"?', match[2] or ""))
