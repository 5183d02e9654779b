"""The file of a head, which is a model to llama.cpp, and the context that it has beside that of the main model."""

from typing import Any

import llama_cpp

from caravan_shard.arrays import Floats
from caravan_shard.backends.llama.heads.head import set_head_parameters
from caravan_shard.backends.llama.heads.head_file import HeadFile, HeadKind
from caravan_shard.backends.llama.heads.states import compute_inputs, computed_inputs
from caravan_shard.backends.llama.memory.context import Contexts
from caravan_shard.backends.llama.model.loading import LoadedModel


def file_head_parameters(contexts: Contexts, sequences: int, context: Any, file: HeadFile) -> Any:
    """Return the ``llama_context_params`` of a head's context. ``contexts``: of its file; ``context``: the model's."""
    parameters = contexts.parameters(contexts.layouts[0])
    set_head_parameters(parameters, sequences)
    # llama.cpp makes room for the logits of all tokens of a batch, also where it encodes.
    most = min(contexts.batch_tokens, max(sequences, contexts.prompt_logprob_tokens))
    if file.block is not None:
        # With more than blocks of all sequences have, llama.cpp reserves no memory for what DSpark adds to logits.
        blocks = sequences * file.block.rows if file.kind is HeadKind.DSPARK else most
        most = max(min(most, blocks), file.block.rows)
    parameters.n_batch = parameters.n_ubatch = parameters.n_outputs_max = most
    # Whose weights it uses where the file has none. llama.cpp reads them from there whenever it builds a graph.
    parameters.ctx_other = context
    return parameters


def state_size(model: Any, head: Any, file: HeadFile) -> int:
    """Return the floats of a kept state: what the layers of the model read, or a hidden state of the head."""
    return max(len(file.layers) * int(llama_cpp.llama_model_n_embd(model)), int(llama_cpp.llama_model_n_embd(head)))


class OpenedFile:
    """The weights of a head and what it reads of its model."""

    def __init__(self, head: LoadedModel, model: LoadedModel, contexts: Contexts) -> None:
        """``contexts``: of the head."""
        assert model.head_file is not None
        self.facts = model.head_file
        self.pointer = head.pointer
        self.size = int(llama_cpp.llama_model_n_embd(head.pointer))
        self.state_size = state_size(model.pointer, head.pointer, self.facts)
        self._head = head
        self._contexts = contexts
        self._input_size = int(llama_cpp.llama_model_n_embd(model.pointer))

    @property
    def floats_read(self) -> int:
        """Floats that it reads of the model for each token."""
        return len(self.facts.layers) * self._input_size

    def parameters(self, context: Any, sequences: int) -> Any:
        """Let ``context``, which is the model's, hand out what the layers read; return parameters of one beside it."""
        compute_inputs(context, self.facts.layers)
        return file_head_parameters(self._contexts, sequences, context, self.facts)

    def read(self, context: Any, rows: int) -> Floats:
        """Return what the layers read in the last forward pass of the model [rows, floats]."""
        return computed_inputs(context, self.facts.layers, rows, self._input_size)

    def close(self) -> None:
        """Free the weights."""
        self._head.close()
