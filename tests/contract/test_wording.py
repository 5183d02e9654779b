"""`make lint` finds the words that texts for users avoid, where users read them and nowhere else."""

import pytest
import wording


def found(words: str) -> list[str]:
    return list(wording.found(wording.Text("a.md", 1, words)))


@pytest.mark.parametrize(
    "sentence",
    [
        "The log tells which shard it was.",
        "All tables but those of GPUs are older.",
        "Nothing but the prompt changes an answer.",
        "Nobody chooses a layout.",
        "`--ram`: most MiB of this host that models take",
        "What stands behind the prompt is computed again.",
        "An answer does not depend on its company.",
        "The thoughts of a model are returned.",
        "So many requests may wait.",
        "A model reads pictures.",
        "Write down what a sound says.",
        "Each token is drawn from the candidates.",
        "Calls of tools are streamed.",
        "Shards are asked in turn.",
        "A model that hears",
        "It is no matter how a draft adds.",
        "Each shard has a thread of its own.",
        "The model is not loaded, and it stays so.",
        "A message names a place. Of several texts, it names the first.",
        "Two\nwords: nothing\nbut the prompt",
    ],
)
def test_avoided_words_are_found(sentence: str) -> None:
    assert found(sentence)


@pytest.mark.parametrize(
    "sentence",
    [
        "The router runs behind nginx, behind a TLS-intercepting proxy or behind the load balancer.",
        "Two models take turns. Most requests are short, and at most 5 MiB each.",
        "There is nothing to do, but the router waits.",
        "See [the page](what-it-tells.md#behind-a-wall).",
        "`nobody` may call `tell()`",
    ],
)
def test_other_words_are_not(sentence: str) -> None:
    assert not found(wording.markdown(sentence))


def test_lines_are_counted_where_code_is_left_out() -> None:
    text = wording.markdown("One\n```sh\necho nobody\n```\n`behind` and nobody\n")
    assert "a.md:5: 'nobody'" in found(text)[0]
    assert len(found(text)) == 1


def test_only_strings_of_scripts_are_read() -> None:
    script = '// nobody\nconst a = { class: "quiet told", accept: "image/*" };\n/* nobody */ b.label = "No picture";\n'
    places = found(wording.page_script(script))
    assert len(places) == 1
    assert "a.md:3: 'picture'" in places[0]


def test_docstrings_are_read_if_they_are_asked_for() -> None:
    module = '"""Of a picture."""\nlog.info("nobody %s", "nobody")\n'
    assert [line for line, _ in wording.python_strings(module, with_docstrings=False)] == [2]
    assert [line for line, _ in wording.python_strings(module, with_docstrings=True)] == [1, 2]


def test_every_exception_is_needed() -> None:
    texts = list(wording.texts())
    for path, fragments in wording.RIGHT.items():
        words = "\n".join(" ".join(text.words.split()) for text in texts if text.path == path)
        for fragment in fragments:
            assert fragment in words, f"{path} does not have {fragment!r} any more"
