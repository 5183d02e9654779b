"""The programs in examples/ run on the demo model, and print what they say they print.

They take half a minute and are slow tests. With every commit, the first program of docs/python.md runs instead: see
test_library.py.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from caravan_testing.serve_process import ON_ONE_CPU, serve
from caravan_testing.shard_models import DEMO_MODEL, fetched

pytestmark = [pytest.mark.model, pytest.mark.timeout(1800)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROGRAMS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
# One process runs all of them, since importing takes longer than most of them.
_RUN_ALL = """
import runpy, sys
for program in sys.argv[5:]:
    print(f"<program {program}>", flush=True)
    sys.path[0] = sys.argv[1]
    more = {"save_and_load": [sys.argv[3]], "batch_file": [f"{sys.argv[3]}/in.txt", f"{sys.argv[3]}/out.jsonl"]}
    first = sys.argv[4] if program.startswith("served_") else sys.argv[2]
    runpy.run_path(f"{sys.argv[1]}/{program}.py")["main"](first, *more.get(program, ()))
"""
QUESTIONS = ["What is the capital of France?", "Name a colour."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def printed(folder: Path) -> dict[str, list[str]]:
    """Return the lines that each program prints."""
    (folder / "in.txt").write_text("\n".join([QUESTIONS[0], "", *QUESTIONS[1:]]) + "\n")
    model = fetched(DEMO_MODEL)
    with serve("--ctx-size", "2048", "--threads", "1", models=(model,)) as served:
        command = [
            sys.executable,
            "-c",
            ON_ONE_CPU + _RUN_ALL,
            str(EXAMPLES),
            str(model),
            str(folder),
            served.url,
            *PROGRAMS,
        ]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    parts = re.split(r"<program (\w+)>\n", ran.stdout)[1:]
    return dict(zip(parts[::2], [part.splitlines() for part in parts[1::2]], strict=True))


@pytest.mark.slow
def test_quick_start(printed: dict[str, list[str]]) -> None:
    first, second, third = printed["quick_start"]
    assert first.startswith("The capital of France is|' Paris")
    assert second.startswith("The capital of Italy is|' Rome")
    assert len(third) > len("Once upon a time|") + 20


@pytest.mark.slow
def test_together(printed: dict[str, list[str]]) -> None:
    apart, together, ratio = (float(re.findall(r": ([\d.]+)", line)[0]) for line in printed["together"])
    assert ratio == pytest.approx(apart / together, rel=0.05)
    assert [line.partition(":")[0] for line in printed["together"]] == ["one after the other", "together", "ratio"]


@pytest.mark.slow
def test_batch_file(printed: dict[str, list[str]], folder: Path) -> None:
    assert printed["batch_file"] == []
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [row["question"] for row in rows] == QUESTIONS
    assert all(len(row["answer"]) > 20 and 5 < row["tokens"] <= 24 for row in rows)


@pytest.mark.slow
def test_chat_tool(printed: dict[str, list[str]]) -> None:
    call, answer = printed["chat_tool"][:2]
    assert re.fullmatch(r"call: price\((apple|pear)\)", call)  # which of them is the small model's choice
    assert len(answer) > len("answer: ") + 5


@pytest.mark.slow
def test_json_schema(printed: dict[str, list[str]]) -> None:
    countries = [json.loads(line) for line in printed["json_schema"]]
    assert [(one["country"].lower(), one["continent"]) for one in countries] == [
        ("france", "Europe"),
        ("japan", "Asia"),
    ]
    assert {type(one["islands"]) for one in countries} == {bool}


@pytest.mark.slow
def test_fork_tones(printed: dict[str, list[str]]) -> None:
    head, *letters = printed["fork_tones"]
    shared, whole = map(int, re.findall(r"(\d+) of (\d+) tokens", head)[0])
    assert 3 * shared < whole
    for letter, tone in zip(letters, (" very angry", " not angry at all", " a great fan of yours"), strict=True):
        assert letter.startswith(tone)
        assert len(letter) > len(tone) + 20


@pytest.mark.slow
def test_retry(printed: dict[str, list[str]]) -> None:
    first, second, third = printed["retry"]
    assert first == third
    assert first.removeprefix("seed 1: ") != second.removeprefix("seed 2: ")


@pytest.mark.slow
def test_guidance(printed: dict[str, list[str]]) -> None:
    plain, guided = (line.partition(": ")[2] for line in printed["guidance"])
    assert plain != guided
    assert "sea" in guided


@pytest.mark.slow
def test_beams(printed: dict[str, list[str]]) -> None:
    scores = [float(line.partition(" ")[0]) for line in printed["beams"]]
    assert scores == sorted(scores, reverse=True)
    assert len({line.partition(" ")[2] for line in printed["beams"]}) == 3


@pytest.mark.slow
def test_save_and_load(printed: dict[str, list[str]]) -> None:
    sizes, *written, same = printed["save_and_load"]
    one, batch = map(int, re.findall(r"\d+", sizes))
    assert 100_000 < one < batch / 2
    # The conversation that was saved alone is one of the batch, too.
    assert written[0] == written[3]
    assert len(set(written)) == 3
    assert same == "True"


@pytest.mark.slow
def test_custom_sampler(printed: dict[str, list[str]]) -> None:
    text = "\n".join(printed["custom_sampler"])
    assert len(text) > 20
    assert "e" not in text.lower()
    assert text.rstrip().endswith((".", "!", "?"))


@pytest.mark.slow
def test_own_engine(printed: dict[str, list[str]]) -> None:
    winter, coffee = printed["own_engine"]
    assert winter.startswith("The best thing about winter is ")
    assert coffee.startswith("The best thing about coffee is ")


@pytest.mark.slow
def test_yes_or_no(printed: dict[str, list[str]]) -> None:
    *answers, summary = printed["yes_or_no"]
    right = sum(f"? {word} (" in answer for answer, word in zip(answers, ("yes",) * 3 + ("no",) * 2, strict=True))
    assert summary == f"{right} of 5 are right"
    # The demo model is too small to be right often; what it says of each question still depends on the question.
    margins = [float(re.findall(r"\(([-+][\d.]+)\)$", answer)[0]) for answer in answers]
    assert [margin > 0 for margin in margins] == ["? yes (" in answer for answer in answers]
    assert len(set(margins)) == 5


@pytest.mark.slow
def test_served_conversation(printed: dict[str, list[str]]) -> None:
    first, italy, river, people, kept, forked = printed["served_conversation"]
    assert "Paris" in first
    for answer in (italy, river):
        cached, whole, text = re.findall(r"(\d+) of (\d+) tokens were cached: (.+)", answer)[0]
        assert int(whole) / 2 < int(cached) < int(whole)
        assert len(text) > 5
    assert len(people) > 5
    assert kept == "What is the capital of France? | And of Italy?"
    assert forked == "What is the capital of France? | How many people live there?"
