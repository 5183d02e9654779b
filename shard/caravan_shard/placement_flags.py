"""The shard's flags for where a model's weights lie, and how they get there."""

import math
import re
from dataclasses import dataclass

from caravan_proto.flags import flag

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorOverride:
    """Tensors whose name ``pattern``, a regular expression, finds lie in ``buffer_type``, a name of llama.cpp's."""

    pattern: str
    buffer_type: str


# The weights of a mixture of experts, as llama-server knows them by their names.
EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
HOST_BUFFERS = "CPU"


@dataclass(frozen=True, kw_only=True)
class PlacementFlags:
    """Flags of `ShardConfig`."""

    gpu_layers: int | None = flag(
        None,
        "number of layers to keep on GPUs; -1 = all [as many as --fit finds room for; all with --fit off]",
        "-ngl",
        "--n-gpu-layers",
        low=-1,
        high=10_000,
    )
    gpu_layers_draft: int | None = flag(
        None,
        "number of layers of the draft model to keep on a GPU; -1 = all [all if --gpu-layers is not 0]",
        "-ngld",
        "--n-gpu-layers-draft",
        low=-1,
        high=10_000,
    )
    device: str = flag(
        "",
        "GPUs to use, by the names that --list-devices prints, separated by commas; none = CPU only [all GPUs]",
        "-dev",
    )
    rpc: str = flag(
        "",
        "llama.cpp rpc-servers whose devices hold layers too: host:port, separated by commas; they have no "
        "authentication, so use them only in a trusted network",
    )
    split_mode: str = flag(
        "layer",
        "how several GPUs share the model: by whole layers, by rows or tensors of each layer, or not at all (none)",
        "-sm",
        choices=("none", "layer", "row", "tensor"),
    )
    tensor_split: str = flag("", "proportions of the model on each GPU, such as 3,1 [by free memory]", "-ts")
    main_gpu: int = flag(
        0, "GPU that holds the whole model with --split-mode none, counted from 0", "-mg", low=0, high=63
    )
    fit: bool = flag(
        True,
        "choose --gpu-layers, --n-cpu-moe and --ctx-size, as far as they are not given, so that the model fits the "
        "GPUs and cells take at most half of what the rest leaves of the host's memory",
        "-fit",
    )
    fit_target: str = flag(
        "1024",
        "MiB that --fit leaves free on each GPU: one number for all, or one for each, separated by commas",
        "-fitt",
    )
    fit_ctx: int = flag(4096, "minimum number of KV cells that --fit chooses", "-fitc", low=256, high=2**30)
    fit_host: int | None = flag(
        None,
        "MiB of the host's memory for which --fit chooses cells, weights included [what is free]",
        low=0,
        high=2**30,
    )
    allow_overcommit: bool = flag(False, "start even if the host or a GPU has less free memory than the model needs")
    cpu_moe: bool = flag(False, "keep the weights of all experts in host memory", "-cmoe")
    n_cpu_moe: int = flag(
        0,
        "number of layers, counted from the first, whose experts' weights stay in host memory",
        "-ncmoe",
        low=0,
        high=1000,
    )
    override_tensor: tuple[str, ...] = flag(
        (),
        "where to place tensors whose names match a regular expression: PATTERN=BUFFER, such as 'ffn_up=CPU'; "
        "several are separated by commas, and the first match wins; repeatable",
        "-ot",
    )
    mmap: bool = flag(
        True,
        "map the file, so that shards share its weights and the host may drop pages that are not in use; off: read "
        "it into memory",
        negation="--no-mmap",
    )
    mlock: bool = flag(False, "lock the weights in memory, so that the host neither drops nor swaps them")
    numa: str = flag(
        "off",
        "placement of threads on hosts with several NUMA nodes: on all nodes, on the node of the start, or as "
        "numactl says",
        choices=("off", "distribute", "isolate", "numactl"),
    )

    def _check_placement(self) -> None:
        """Raise ValueError if fields contradict each other or cannot be read."""
        parts = self.proportions
        if parts and not (min(parts) >= 0 and 0 < sum(parts) < math.inf):
            raise ValueError(f"tensor-split must have proportions >= 0, one of them > 0. Given: {self.tensor_split!r}")
        if self.rpc_servers and (self.gpu_layers == 0 or self.device_names == []):
            raise ValueError("rpc-servers would hold no layer: pass another -ngl, and no --device none")
        if self.rpc_servers and self.split_mode not in {"layer", "none"}:
            raise ValueError(f"rpc-servers hold whole layers: pass -sm layer. Given: {self.split_mode}")
        if self.cpu_moe and self.n_cpu_moe:
            raise ValueError(f"cpu-moe is for all layers: drop it, or drop --n-cpu-moe. Given: {self.n_cpu_moe}")
        assert self.tensor_overrides is not None
        assert self.margins

    @property
    def uses_gpus(self) -> bool:
        """Whether layers may be on GPUs, if there are any. While --fit has not chosen them, none are."""
        return self.gpu_layers not in (None, 0) and self.device_names != []

    @property
    def device_names(self) -> list[str] | None:
        """The devices that --device names; None for all."""
        if not self.device:
            return None
        return [] if self.device == "none" else [name.strip() for name in self.device.split(",")]

    @property
    def rpc_servers(self) -> list[str]:
        """The addresses that --rpc names; raises ValueError."""
        return parse_rpc_servers(self.rpc)

    @property
    def proportions(self) -> list[float]:
        """The proportions of --tensor-split; raises ValueError."""
        if not self.tensor_split:
            return []
        try:
            return [float(part) for part in self.tensor_split.split(",")]
        except ValueError:
            raise ValueError(f"tensor-split must be numbers with commas. Given: {self.tensor_split!r}") from None

    @property
    def margins(self) -> list[int]:
        """The bytes of --fit-target: for all devices, or for each. Raises ValueError."""
        parts = self.fit_target.split(",")
        if not all(part.isascii() and part.isdecimal() for part in parts):
            raise ValueError(f"fit-target must be whole numbers of MiB with commas. Given: {self.fit_target!r}")
        return [int(part) * _MIB for part in parts]

    @property
    def tensor_overrides(self) -> list[TensorOverride]:
        """The overrides in the order in which llama.cpp tries them; raises ValueError."""
        given = [_parse_override(part) for text in self.override_tensor for part in text.split(",")]
        patterns = [EXPERTS] if self.cpu_moe else [rf"blk\.{layer}{EXPERTS}" for layer in range(self.n_cpu_moe)]
        return [*given, *(TensorOverride(pattern, HOST_BUFFERS) for pattern in patterns)]


def _parse_override(text: str) -> TensorOverride:
    # Like llama-server, which looks for the first sign.
    pattern, _, buffer_type = text.partition("=")
    if not (pattern and buffer_type):
        raise ValueError(f"override-tensor must be PATTERN=BUFFER. Given: {text!r}")
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"override-tensor has no regular expression before the =: {error}. Given: {text!r}") from None
    return TensorOverride(pattern, buffer_type)


def parse_rpc_servers(text: str) -> list[str]:
    """Return the addresses in the value of --rpc; raises ValueError."""
    servers = [server.strip() for server in text.split(",")] if text else []
    for server in servers:
        host, _, port = server.partition(":")
        if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ValueError(f"rpc must be host:port with commas, without IPv6. Given: {text!r}")
    if len(set(servers)) < len(servers):
        raise ValueError(f"rpc has a server twice. Given: {text!r}")
    return servers
