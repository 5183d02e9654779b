"""With --exact, logits behind pictures are bit by bit those behind words, however the prompt is cut."""

from pathlib import Path

import numpy as np

from caravan_proto.messages.limits import KvLayout
from caravan_testing.media_prompts import MediaPrompt, run_prompt
from caravan_testing.projectors import WORDS, SpellingModel


def test_exact_logits_do_not_depend_on_chunks(tmp_path: Path) -> None:
    model = SpellingModel(tmp_path)
    driver = model.driver(KvLayout.SPLIT, exact=True, flash_attn="auto")
    expected = run_prompt(driver, MediaPrompt(WORDS))
    logits = driver.backend.logits(1).copy()
    for cuts in ([], [5], [4, 20, 21], [1, 2, 3, 9, 10, 11]):
        driver.engine.release_all()
        assert run_prompt(driver, model.prompt(driver), cuts=cuts) == expected
        np.testing.assert_array_equal(driver.backend.logits(1), logits)
    driver.engine.close()
