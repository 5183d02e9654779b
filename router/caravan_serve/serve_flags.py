"""The command line of `caravan serve`: the flags of the router and of the shards as one parser, in groups."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from caravan_proto.command_line import Parser
from caravan_proto.config_file import add_config_flag
from caravan_proto.flags import add_flags, flag
from caravan_router.config import RouterConfig
from caravan_serve.catalogue.setup import CatalogueFlags
from caravan_serve.peers import SERVE_FLAGS
from caravan_serve.shard_flags import SET_BY_ROUTER, SET_BY_SERVE
from caravan_shard.config import ShardConfig

_DESCRIPTION = """Serve models over HTTP, with the APIs of OpenAI, Anthropic, Google, Ollama, TGI and llama-server.

examples:
  caravan serve smollm2                           a known name: see caravan list --known
  caravan serve hf:Qwen/Qwen3-8B-GGUF -c 65536    a repository, with 65,536 tokens for all requests
  caravan serve a.gguf b.gguf --port 8080 --hostname 0.0.0.0
  caravan serve --models-dir ./models             loads the model that a request names

Every flag is an environment variable too, such as CARAVAN_PORT, and a key of the file that --config names."""

# Listed before the others, in this order.
_FIRST = (
    *("port", "hostname", "ctx_size", "parallel", "gpu_layers"),
    *("shards", "models_dir", "models_hub", "api_key", "log_level"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig(CatalogueFlags):
    """Flags of `caravan serve` that neither the router nor the shards have."""

    shards: int = flag(
        1, "number of shard processes per --model on this host, each with the whole model", low=1, high=64
    )
    exit_with_parent: bool = flag(False, "exit when the process that started this one ends (Linux)")


# The groups of a configuration: the field with which each begins, and its title.
_GROUPS: tuple[tuple[type[Any], dict[str, str]], ...] = (
    (
        ShardConfig,
        {
            "model": "the model, its cells and threads",
            "gpu_layers": "GPUs and memory",
            "temp": "defaults of requests",
        },
    ),
    (ServeConfig, {"models_dir": "models on demand"}),
    (
        RouterConfig,
        {
            "hostname": "addresses and shards elsewhere",
            "max_concurrent_requests": "limits of requests and connections",
            "api_keys_file": "keys, HTTPS and the page",
            "prefill_mode": "scheduling",
            "speculate": "drafts, streams and lost shards",
            "state_file": "stored responses, recording and shutdown",
            "vllm_metrics": "metrics, traces and logs",
        },
    ),
    (
        ShardConfig,
        {
            "rope_scaling": "stretched contexts",
            "mmproj": "images and audio",
            "flash_attn": "computation, saved prefixes, embeddings and adapters",
            "certfile": "the toy model, and limits of shards",
        },
    ),
)


class _Layout(argparse.RawDescriptionHelpFormatter):
    """Leaves 30 columns to the names, and the lines of the description as they are."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=30, **options)


def serve_parser() -> Parser:
    """Return the parser of all flags, those that are needed most often first."""
    parser = Parser(
        prog="caravan serve",
        usage="caravan serve [MODEL ...] [FLAGS]",
        description=_DESCRIPTION,
        formatter_class=_Layout,
        foreign=SERVE_FLAGS,
        add_help=False,
    )
    first = parser.add_argument_group("the flags that matter first")
    first.add_argument("words", nargs="*", metavar="MODEL", help="a file, a known name or a place on a hub")
    first.add_argument(
        "-m", "--model", action="append", dest="models", metavar="MODEL", help="the same as a flag; repeatable"
    )
    every = [(config, field) for config in (ServeConfig, RouterConfig, ShardConfig) for field in _fields(config)]
    for name in _FIRST:
        config, field = next(one for one in every if one[1].name == name)
        add_flags(first, config, [field])
    add_config_flag(first)
    first.add_argument("-h", "--help", action="help", help="show all flags")
    for config, titles in _GROUPS:
        for title, fields in _grouped(config, titles):
            add_flags(parser.add_argument_group(title), config, fields)
    return parser


def _fields(config: type[Any]) -> list[dataclasses.Field[Any]]:
    """Return the fields that are flags of `caravan serve`, each once."""
    left_out = (*SET_BY_SERVE, "model", *SET_BY_ROUTER) if config is ShardConfig else ()
    return [field for field in dataclasses.fields(config) if field.name not in left_out]


def _grouped(config: type[Any], titles: dict[str, str]) -> Iterator[tuple[str, Sequence[dataclasses.Field[Any]]]]:
    """Yield the groups of ``titles`` with their fields. A group ends where any other begins."""
    begins = {name for one, groups in _GROUPS if one is config for name in groups}
    fields = dataclasses.fields(config)
    shown = {field.name for field in _fields(config)}.difference(_FIRST)
    for first, title in titles.items():
        start = next(place for place, field in enumerate(fields) if field.name == first)
        end = next((place for place in range(start + 1, len(fields)) if fields[place].name in begins), len(fields))
        yield title, [field for field in fields[start:end] if field.name in shown]
