"""A beam search written plainly, over whole rows of logprobs: what a search by shards must return.

It follows ``GenerationMixin._beam_search`` of Hugging Face's transformers 5.23 (src/transformers/generation/utils.py),
for one prompt and without its tensors.
"""

import heapq
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from caravan_scheduler.core.generation import EarlyStopping, GenerationSpec


class BeamOutput(NamedTuple):
    score: float
    tokens: tuple[int, ...]


def beam_outputs(
    logprobs_after: Callable[[tuple[int, ...]], Sequence[float]], spec: GenerationSpec
) -> list[BeamOutput]:
    """Return as many outputs as the search of ``spec`` is wide, best first, end tokens included.

    ``logprobs_after``: returns the logprob of each token of the vocabulary after some tokens.
    """
    search, stopping = spec.beams, spec.stopping
    assert search is not None
    ends = set(stopping.stop_token_ids) | (set() if stopping.ignore_eos else set(search.eos_token_ids))
    width, penalty, longest = search.width, search.length_penalty, stopping.max_new_tokens
    keep = max(2, 1 + len(ends)) * width
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[BeamOutput] = []
    for length in range(1, longest + 1):
        rows = [(total, tokens, logprobs_after(spec.prompt + tokens)) for total, tokens in running]
        found = [
            (total + logprob, -place, -token, (*tokens, token))
            for place, (total, tokens, row) in enumerate(rows)
            for token, logprob in enumerate(row)
        ]
        best = heapq.nlargest(keep, found)
        for total, _, _, tokens in best[:width]:
            if tokens[-1] in ends or length == longest:
                finished.append(BeamOutput(total / length**penalty, tokens))
        finished = sorted(finished, key=lambda one: -one.score)[:width]
        running = [(total, tokens) for total, _, _, tokens in best if tokens[-1] not in ends][:width]
        if len(finished) == width:
            if search.early_stopping is EarlyStopping.YES:
                break
            judged = longest if search.early_stopping is EarlyStopping.NEVER and penalty > 0 else length
            if running[0][0] / judged**penalty <= finished[-1].score:
                break
    return finished


VOCABULARY = 23
EOS_TOKEN_IDS = (3, 7)


def logprobs_after(tokens: tuple[int, ...]) -> list[float]:
    """Return the logprob of each next token: the same numbers in every process."""
    state = 7
    for position, token in enumerate(tokens):
        state = (state * 31 + token * 17 + position) % 1_000_003
    logits = [((state * 7919 + token * 104_729 + 31) % 1_000_033) / 200_000 for token in range(VOCABULARY)]
    total = math.log(sum(math.exp(logit) for logit in logits))
    return [logit - total for logit in logits]


def _model() -> Any:
    """Return the function as a model of transformers."""
    torch, transformers = import_module("torch"), import_module("transformers")
    outputs = import_module("transformers.modeling_outputs")

    def begin(model: Any) -> None:
        transformers.PreTrainedModel.__init__(model, transformers.PretrainedConfig(vocab_size=VOCABULARY))
        model.unused = torch.nn.Linear(1, 1)  # transformers asks a model's weights for its device

    def forward(_: Any, input_ids: Any, **__: Any) -> Any:
        rows = [[logprobs_after(tuple(row))] for row in input_ids.tolist()]
        return outputs.CausalLMOutputWithPast(logits=torch.tensor(rows, dtype=torch.float64))

    def inputs(_: Any, input_ids: Any, **__: Any) -> Any:
        return {"input_ids": input_ids}

    methods = {
        "__init__": begin,
        "forward": forward,
        "prepare_inputs_for_generation": inputs,
        "config_class": transformers.PretrainedConfig,
    }
    return type("Tiny", (transformers.PreTrainedModel, transformers.GenerationMixin), methods)()


def main() -> None:
    """Write the record as JSON."""
    torch, model = import_module("torch"), _model()
    cases = []
    for prompt, width, penalty, early, new in itertools.product(
        ((1,), (2, 5, 9)), (1, 2, 4), (-1.0, 0.0, 1.0, 2.5), (False, True, "never"), (1, 9)
    ):
        if width == 1:
            early = False
        output = model.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=new,
            length_penalty=penalty,
            early_stopping=early,
            do_sample=False,
            use_cache=False,
            eos_token_id=list(EOS_TOKEN_IDS),
            pad_token_id=VOCABULARY - 1,
            output_scores=True,
            return_dict_in_generate=True,
        )
        outputs = []
        for row in output.sequences[:, len(prompt) :].tolist():
            ends = [place for place, token in enumerate(row) if token in EOS_TOKEN_IDS]
            outputs.append(row[: ends[0] + 1] if ends else row[:new])
        scores = [] if width == 1 else [round(score, 4) for score in output.sequences_scores.tolist()]
        case = {"prompt": prompt, "width": width, "length_penalty": penalty, "early_stopping": early, "new": new}
        cases.append(case | {"outputs": outputs, "scores": scores})
    record = {"transformers": import_module("transformers").__version__, "cases": cases}
    json.dump(record, sys.stdout)
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
