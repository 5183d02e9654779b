"""The tokens for filling in the middle, as llama.cpp knows them."""

import pytest

from caravan_proto.messages.model import FillTokens
from caravan_testing.shard_models import DEMO_MODEL

pytestmark = pytest.mark.model

# The demo model has none of its own but for <repo_name>, so a file's metadata name three of its control tokens.
KEYS = {"fim_pre": 5, "fim_suf": 6, "fim_mid": 7, "fim_sep": 8}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), None),
        (("fim_pre", "fim_suf"), None),
        (("fim_pre", "fim_suf", "fim_mid"), FillTokens(prefix=5, suffix=6, middle=7, repository=4)),
        (tuple(KEYS), FillTokens(prefix=5, suffix=6, middle=7, repository=4, file=8)),
    ],
)
def test_a_model_fills_in_if_it_has_three_tokens(given: tuple[str, ...], expected: FillTokens | None) -> None:
    from llama_cpp import Llama

    from caravan_shard.backends.llama.model.vocabulary import LlamaVocabulary

    overrides: dict[str, bool | int | float | str] = {f"tokenizer.ggml.{key}_token_id": KEYS[key] for key in given}
    model = Llama(str(DEMO_MODEL), vocab_only=True, verbose=False, kv_overrides=overrides)
    assert LlamaVocabulary(model._model.vocab).fill_tokens() == expected
    model.close()


def test_a_begin_token_is_named_where_the_model_wants_one() -> None:
    from llama_cpp import Llama

    from caravan_shard.backends.llama.model.vocabulary import LlamaVocabulary

    overrides: dict[str, bool | int | float | str] = {
        f"tokenizer.ggml.{key}_token_id": token for key, token in KEYS.items()
    }
    model = Llama(
        str(DEMO_MODEL), vocab_only=True, verbose=False, kv_overrides=overrides | {"tokenizer.ggml.add_bos_token": True}
    )
    fill = LlamaVocabulary(model._model.vocab).fill_tokens()
    assert fill is not None
    assert fill.begin == 1
    model.close()
