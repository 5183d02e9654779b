"""What operators write where a model is asked for."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_models.errors import FetchError, FetchProblem
from caravan_models.reference import (
    HUB_PREFIX,
    Choice,
    HubModel,
    KnownModel,
    LocalFile,
    NamedFile,
    Quantisation,
    known_model,
    known_models,
    parse_hub,
    parse_reference,
)


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("demo/small", HubModel("demo/small")),
        ("demo/small:q4_k_m", HubModel("demo/small", Quantisation("Q4_K_M"))),
        ("demo/small:UD-Q4_K_XL@v1.0", HubModel("demo/small", Quantisation("UD-Q4_K_XL"), "v1.0")),
        ("demo/small@refs/pr/3", HubModel("demo/small", None, "refs/pr/3")),
        ("o.r-g_1/Re.po-1:sub/a b@1-Q8_0.gguf", HubModel("o.r-g_1/Re.po-1", NamedFile("sub/a b@1-Q8_0.gguf"))),
        ("demo/small:x.GGUF@main", HubModel("demo/small", NamedFile("x.GGUF"), "main")),
    ],
)
def test_a_place_on_a_hub(text: str, model: HubModel) -> None:
    assert parse_hub(text) == model
    assert parse_reference(f"hf:{text}") == model
    assert parse_hub(model.name) == model


@pytest.mark.parametrize(
    "text",
    [
        "", "small", "demo/", "/small", "a/b/c", "../small", "demo/..", "demo/sm all", "demo//small", "-x/small",
        "demo/small:", "demo/small:../x.gguf", "demo/small:/x.gguf", "demo/small:a//x.gguf", "demo/small:a\nb.gguf",
        "demo/small:Q4 0", "demo/small@", "demo/small@a..b", "demo/small@/x", "http://demo/small", "demo/small?x=1",
        "demo/a--b", "dé/small", "demo/small:Q4_0:Q5_0", "demo/small:.hidden.gguf", "demo/" + "x" * 92,
    ],
)  # fmt: skip
def test_what_is_no_place_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(FetchError, match="pass hf:OWNER/REPOSITORY") as failed:
        parse_hub(text)
    assert failed.value.problem is FetchProblem.BAD_REFERENCE


_LETTERS = st.text("abcXYZ019_", min_size=1, max_size=8)
_CHOICES: st.SearchStrategy[Choice] = st.one_of(
    st.none(),
    st.builds(Quantisation, st.from_regex(r"[A-Z0-9][A-Z0-9_-]{0,8}", fullmatch=True)),
    st.builds(lambda parts: NamedFile("/".join(parts) + ".gguf"), st.lists(_LETTERS, min_size=1, max_size=3)),
)


@given(
    st.builds(lambda owner, name: f"{owner}/{name}", _LETTERS, _LETTERS),
    _CHOICES,
    st.lists(_LETTERS, min_size=1, max_size=2),
)
def test_a_models_name_means_the_model(repository: str, choice: Choice, revision: list[str]) -> None:
    model = HubModel(repository, choice, "/".join(revision))
    assert parse_hub(model.name) == model


def test_every_known_name_is_a_place_on_a_hub() -> None:
    models = known_models()
    assert {"smollm2", "gemma3:270m"} <= models.keys()
    for name, model in models.items():
        assert name == model.name == name.lower()
        assert isinstance(model.source.choice, Quantisation)
        # With the size that a name without one stands for.
        assert any(other.startswith(f"{name.partition(':')[0]}:") for other in models)


def test_names_are_found_as_clients_write_them() -> None:
    for name in ("smollm2", "SmolLM2", "smollm2:latest"):
        found = known_model(name)
        assert found is not None
        assert found.name == "smollm2"


@pytest.mark.parametrize("name", ["", "hf:demo/small", "../smollm2", "/etc/passwd", "smollm2/", "x.gguf", "http://x/y"])
def test_a_request_gets_known_names_and_nothing_else(name: str) -> None:
    assert known_model(name) is None


def test_a_file_that_is_there_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert isinstance(parse_reference("smollm2"), KnownModel)
    (tmp_path / "smollm2").touch()
    assert parse_reference("smollm2") == LocalFile(Path("smollm2"))
    assert parse_reference("missing/x.gguf") == LocalFile(Path("missing/x.gguf"))
    assert isinstance(parse_reference(f"{HUB_PREFIX}demo/small"), HubModel)
