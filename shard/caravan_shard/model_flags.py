"""The shard's flags for the model's file, its cells and its steps."""

from dataclasses import dataclass

from caravan_proto.flags import flag
from caravan_proto.messages.limits import KvLayout

# llama.cpp compiles with LLAMA_MAX_SEQ = 256.
MAX_SEQUENCES = 256
_CELLS = 8192


@dataclass(frozen=True, kw_only=True)
class ModelFlags:
    """Flags of `ShardConfig`."""

    model: str = flag("", "GGUF file to serve, or the name of a model: hf:OWNER/REPOSITORY:QUANTISATION, smollm2", "-m")
    alias: str = flag(
        "",
        "name under which clients find the model, or several between commas, of which the first is listed as its own "
        "[the file's name]",
        "-a",
    )
    model_draft: str = flag(
        "",
        "smaller model with the same vocabulary, which drafts tokens where that saves time: a GGUF file or a name; "
        "it has as many KV cells as the model",
        "-md",
    )
    ctx_size: int | None = flag(
        None,
        "KV cells of all sequences together; 0 = the context that the model was trained with [8192; on GPUs with --fit "
        "as many as they have room for, from --fit-ctx to the trained context]",
        "-c",
        low=0,
        high=2**30,
    )
    parallel: int = flag(8, "most sequences held at a time", "-np", low=1, high=MAX_SEQUENCES)
    rollback_tokens: int = flag(
        0,
        "most draft tokens of a sequence in one step of a model with recurrent layers, which llama.cpp takes back if "
        "they are wrong, for some architectures; each takes as much memory as the recurrent states of all sequences; "
        "caravan serve takes as many as --speculate, 8 at most",
        low=0,
        high=64,
    )
    kv_layout: str = flag(
        "auto",
        "split: ctx-size / parallel cells for each sequence; unified: one pool of cells, prefixes are shared; "
        "auto: split while all sequences fit, else unified",
        choices=["auto", *(layout.value for layout in KvLayout)],
    )
    batch_size: int = flag(2048, "most tokens in one step", "-b", low=1, high=2**20)
    ubatch_size: int = flag(512, "most tokens computed at a time within a step", "-ub", low=1, high=2**20)
    threads: int | None = flag(
        None,
        "threads for a step over a single token [physical cores, at most the quota of the control group]",
        "-t",
        low=1,
        high=512,
    )
    threads_batch: int | None = flag(
        None, "threads for every other step, also of two decoding sequences [as --threads]", "-tb", low=1, high=512
    )
    spin_count: int = flag(
        3_000,
        "how often a compute thread looks for its next part before it sleeps; see GOMP_SPINCOUNT",
        low=0,
        high=2**40,
    )

    def cells_of(self, trained_context: int) -> int:
        """Return the number of cells to ask for; llama.cpp may round it up."""
        return _CELLS if self.ctx_size is None else self.ctx_size or trained_context
