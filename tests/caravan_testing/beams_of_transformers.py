"""Records what Hugging Face's ``generate`` returns for a model that is a fixed function of the tokens before.

Needs torch and transformers, which the tests do not: they compare with the record. To make it again:

    python tests/caravan_testing/beams_of_transformers.py > tests/unit/scheduler/beams_of_transformers.json
"""

import itertools
import json
import math
import sys
from importlib import import_module
from typing import Any

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
