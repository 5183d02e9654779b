"""What a shard says of its model and of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from caravan_proto.messages.limits import Limits
from caravan_proto.messages.media import MediaFacts
from caravan_proto.messages.sampling import RequestDefaults

MetadataValue = str | int | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FillTokens:
    """Control tokens for filling in the middle of a text.

    A prompt is: begin, prefix, the text before, suffix, the text after, middle. ``repository`` stands before the name
    of a repository, ``file`` before the name of each of its files. None: the vocabulary has none, or for ``begin`` the
    model wants none.
    """

    prefix: int
    suffix: int
    middle: int
    begin: int | None = None
    repository: int | None = None
    file: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """Facts about a model file, and the names of the adapters loaded for it.

    ``aliases``: other names that clients may use. ``fingerprint``: equal for files of the same content, and maybe for
    others that were made from the same model. ``sha256``: of the whole file; of several parts, of their digests in
    order; "" while it is not known. ``vocabulary_fingerprint``: equal where every token id stands for the same text,
    "" if unknown. ``trained_context``: in tokens. ``tool_template``: that for prompts with tools, if the model has
    one beside ``chat_template``. ``eos_token_ids``: tokens that end an output. ``draft_model``: the name of the draft
    model, "" without one. ``fill``: None if the vocabulary lacks a token that filling in needs. ``media``: None if
    prompts have text only. ``request_defaults``: of the file and the operator, see `valid_defaults`.

    The rest describes the file for people and tools. ``weight_bytes`` is the size of all weights, ``device_bytes`` of
    those in the memory of accelerators. ``quantization`` is the type of most weights. ``modified_s``: when the file was
    last changed, in seconds since 1970. ``metadata`` has GGUF keys. A value that is unknown is its default.
    """

    name: str
    fingerprint: str
    vocabulary_size: int
    chat_template: str
    bos_text: str
    eos_text: str
    sha256: str = ""
    vocabulary_fingerprint: str = ""
    trained_context: int = 0
    tool_template: str = ""
    adapters: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    draft_model: str = ""
    eos_token_ids: frozenset[int] = frozenset()
    fill: FillTokens | None = None
    media: MediaFacts | None = None
    request_defaults: RequestDefaults = ()
    architecture: str = ""
    parameter_count: int = 0
    weight_bytes: int = 0
    quantization: str = ""
    modified_s: int = 0
    device_bytes: int | None = None
    metadata: tuple[tuple[str, MetadataValue], ...] = ()

    @property
    def digest(self) -> str:
        """What names the file for people and tools: until it is known what is in it, what is known at once."""
        return self.sha256 or self.fingerprint


class Kernels(Enum):
    """Which of Caravan's kernels a shard has: all, those for sampling and log probabilities, or none."""

    OWN = "own"
    SAMPLING = "sampling"
    STOCK = "stock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """How a shard computes logits. It follows from the model, the build, the processor and the flags alone.

    ``fingerprint``: shards of an equal one compute the same bits. ``exact``: --exact is given and was checked.
    ``flash_attention``: by the name of a layout, whether it may have it. ``same_in_company``: the logits after a token
    do not depend on the tokens of other sequences in its step. ``same_in_chunks``: nor on how many of its
    tokens are computed with it, so that drafts change no text. Both None if that could not be compared. ``kernels``:
    None if that is unknown, or the backend is not llama.cpp.
    """

    fingerprint: str
    exact: bool = False
    flash_attention: Mapping[str, bool] = field(default_factory=dict)
    same_in_company: bool | None = None
    same_in_chunks: bool | None = None
    kernels: Kernels | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Info:
    """A shard's identity, lease, limits and model.

    ``shard_id`` is its name, ``version`` that of its program. ``incarnation`` is new with every start of its process.
    ``epoch`` numbers its last lease, 0 before the first; ``leased`` says whether a router still holds that one.
    ``holder_url``: where other routers reach that router; empty if they cannot.
    """

    shard_id: str
    version: str
    incarnation: str
    model: ModelFile
    limits: Limits
    numerics: Numerics
    epoch: int = 0
    leased: bool = False
    holder_url: str = ""


@dataclass(frozen=True, slots=True)
class ShardClaim:
    """What a router that wants a shard says of itself: how many it holds of the shard's model.

    ``urgent``: requests wait there, and no shard serves them.
    """

    held: int
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardStatus:
    """A shard's progress: steps since its start, the sequences that it holds, whether it has work, whether it drains.

    ``claim``: of another router that asks for it; None if there is none. ``knows_contents``: its files were read, so
    that `Info` says what is in them, and it uses what was saved before.
    """

    steps: int
    sequences: int = 0
    busy: bool
    draining: bool
    claim: ShardClaim | None = None
    knows_contents: bool = False


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text in columns: for each token its id, its raw bytes, and whether it is a control token."""

    token_ids: tuple[int, ...]
    pieces: tuple[bytes, ...]
    specials: tuple[bool, ...]
