"""`import caravan` on a real model: what docs/python.md prints runs, and outputs equal those of the shard alone.

Of the programs there, the first one runs with every commit. The others take half a minute and are slow tests.
"""

import re
import subprocess
import sys
from ast import literal_eval
from pathlib import Path

import pytest

from caravan import LLM, SamplingParams
from caravan_testing.serve_process import ON_ONE_CPU, serve
from caravan_testing.shard_builders import first_chunk
from caravan_testing.shard_models import DEMO_MODEL, WORDS_MODEL, ModelDriver, fetched

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
EXPECTED = (
    (" Paris",),
    ("0 ", "\n1 ", "Paris"),
    (" the capital of the ",),
    ("weather {'city': ", "{'capital': 'Paris"),
    ("Paris", "tokens were cached: ", "['system', 'user', 'assistant', 'user', 'assistant']"),
    (" ",),
    ("[", ", ", "]\n"),
    ("0 ",),
    ("576\n", "The Loire 0.", "A hammer 0."),
    ("cleanliness 0.", "service 0.", "price 0."),
    (" Paris", "\n Paris"),
    ("(49152,)  Paris\n", "2 of 2\n", "The capital of France is Paris | The capital of France is"),
    (" tokens stay: ", "Rome"),
    ("True READY  Paris\n", "The capital of France is | ", " | "),
    ("Paris is the capital of [' ", "Rome is the capital of [' "),
    ("0 ' Paris", "1 '"),
    ("\n['user'",),
)
# Where the programs expect a server.
URL = "http://127.0.0.1:3000"


def _run(program: str, folder: Path) -> str:
    """Run a program in a process of its own, in a folder that has a model, and return what it prints."""
    (folder / "model.gguf").symlink_to(fetched(DEMO_MODEL))
    ran = subprocess.run(
        [sys.executable, "-c", f"{ON_ONE_CPU}\n{program}"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


@pytest.mark.slow
def test_the_programs_of_the_documentation_run_as_printed(tmp_path: Path) -> None:
    """One process runs them one after another, since importing takes longer than most of them."""
    with serve("--ctx-size", "2048", "--threads", "1", models=(fetched(DEMO_MODEL),)) as served:
        programs = [program.replace(URL, served.url) for program in PROGRAMS[1:]]
        program = f"for program in {programs!r}:\n    print('<program>')\n    exec(program, {{'__name__': 'program'}})"
        printed = _run(program, tmp_path).split("<program>\n")[1:]
    for number, (text, expected) in enumerate(zip(printed, EXPECTED, strict=True), 1):
        for part in expected:
            assert part in text, number


def test_the_quick_start_of_vllm_runs_and_ends_by_itself(tmp_path: Path) -> None:
    """It closes nothing, so the model ends with the program."""
    lines = _run(PROGRAMS[0], tmp_path).splitlines()
    prompts = (
        "Hello, my name is",
        "The president of the United States is",
        "The capital of France is",
        "The future of AI is",
    )
    starts = [f"Prompt: '{prompt}', Generated text: " for prompt in prompts]
    assert [line[: len(start)] for line, start in zip(lines, starts, strict=True)] == starts
    # They are drawn without a seed: one may end at once.
    assert any(literal_eval(line[len(start) :]) for line, start in zip(lines, starts, strict=True))


def test_the_next_turn_of_a_session_has_the_tokens_that_the_model_generated() -> None:
    """The reply is spelled letter by letter, where the tokenizer has words."""
    with LLM(fetched(DEMO_MODEL), ctx_size=2048, parallel=2) as llm:
        session = llm.chat_session(system="Answer in one sentence.")
        letters = {llm.tokenize(letter, add_special=False)[0]: 100.0 for letter in "the"}
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True, logit_bias=letters)
        first = session.respond("Tell me a story.", params)
        assert llm.tokenize(first.text, add_special=False) != list(first.token_ids)
        exact = session._awaited._state.token_ids
        second = session.respond("Go on.", SamplingParams(temperature=0, max_tokens=4))
        assert session._awaited._state.token_ids[: len(exact)] == exact
        assert second.cached_tokens >= len(exact) - 1
        # Without the session, the same messages have other tokens.
        (answer,) = llm.chat(session.messages[:-1], SamplingParams(temperature=0, max_tokens=4))
        assert tuple(answer.prompt_token_ids[: len(exact)]) != exact


@pytest.mark.parametrize(
    "model",
    [pytest.param(WORDS_MODEL, id="words"), pytest.param(DEMO_MODEL, id="demo", marks=pytest.mark.slow)],
)
def test_a_batch_equals_each_prompt_alone_on_the_shard(model: Path) -> None:
    options = {"ctx_size": 2048, "kv_layout": "split", "parallel": 4, "threads": 1}
    prompts = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time there was", "Water is made of"]
    driver = ModelDriver(fetched(model), **options)
    alone = []
    for prompt in prompts:
        tokens = driver.backend.vocabulary.tokenize(prompt, add_special=True, parse_special=True)
        driver.prefill(first_chunk(0, tokens, max_new=20, ignore_eos=True))
        driver.decode([0])
        alone.append(driver.output[0])
        driver.keep()
    driver.engine.close()
    with LLM(fetched(model), **options) as llm:  # type: ignore[arg-type]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == alone
