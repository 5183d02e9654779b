"""The heads of tiny models that predict several tokens (MTP), right by construction as often as a test wants.

The layers of such a model write next to nothing, so that its next token follows nearly always from the last one alone;
the head makes its logits of that token, too. The less the layers write, the more often the head is right.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from caravan_testing.tiny_weights import RandomWeights, Weights

# What ends a layer, in the files of all architectures here.
_WRITES = ("attn_output", "ssm_out", "ffn_down")


@dataclass(frozen=True, slots=True)
class Heads:
    """``trunk``: how much the model's layers write, 1 for as much as without heads. ``state``: the share of the hidden
    state, which stands for the tokens before, in what the head reads. ``right``: the share of tokens that the head does
    not take for others.
    """

    trunk: float
    state: float = 0.0
    right: float = 1.0

    def added(
        self, tensors: Mapping[str, Weights], layer: int, block: Mapping[str, Weights], drawn: RandomWeights
    ) -> dict[str, Weights]:
        """Return the tensors of a model with a head in ``layer``, behind all others, which is like ``block``."""
        size = len(block["attn_norm.weight"])
        projection = {
            "nextn.eh_proj.weight": np.concatenate([np.eye(size), drawn(size, size, scale=self.state)], axis=1),
            "nextn.enorm.weight": np.ones(size),
            "nextn.hnorm.weight": np.ones(size),
            "nextn.shared_head_norm.weight": np.ones(size),
        }
        if self.right < 1.0:
            projection["nextn.embed_tokens.weight"] = self._mistaken(tensors["token_embd.weight"])
        head = {f"blk.{layer}.{name}": tensor for name, tensor in (_weakened(block, self.state) | projection).items()}
        return _weakened(tensors, self.trunk) | head

    def _mistaken(self, embedding: Weights) -> Weights:
        random = np.random.default_rng(37)
        tokens = np.arange(len(embedding))
        is_wrong = random.random(len(tokens)) >= self.right
        taken_for = random.integers(len(tokens), size=len(tokens))
        return embedding[np.where(is_wrong, taken_for, tokens)]


def _weakened(tensors: Mapping[str, Weights], scale: float) -> dict[str, Weights]:
    """Return layers that write less."""
    return {
        name: scale * tensor if any(part in name for part in _WRITES) else tensor for name, tensor in tensors.items()
    }
