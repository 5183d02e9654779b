"""What names mean, and which files of a repository or a folder they need."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_models.cached_model import local_projector
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.listing import RepositoryFile, choose, models_in, quantisation_of, size_text, title_of
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

# As repositories of the hub name their files.
BARTOWSKI = [
    "README.md", "google_gemma-3-4b-it.imatrix", "gemma-imatrix.gguf", "google_gemma-3-4b-it-Q4_K_M.gguf",
    "google_gemma-3-4b-it-Q4_K_L.gguf", "google_gemma-3-4b-it-Q8_0.gguf", "google_gemma-3-4b-it-bf16.gguf",
    "mmproj-google_gemma-3-4b-it-f16.gguf", "mmproj-google_gemma-3-4b-it-bf16.gguf",
]  # fmt: skip
UNSLOTH = [
    "BF16/gpt-BF16-00001-of-00002.gguf", "BF16/gpt-BF16-00002-of-00002.gguf", "Q4_K_M/gpt-Q4_K_M-00001-of-00003.gguf",
    "Q4_K_M/gpt-Q4_K_M-00002-of-00003.gguf", "Q4_K_M/gpt-Q4_K_M-00003-of-00003.gguf", "gpt-UD-Q4_K_XL.gguf",
    "gpt-UD-IQ1_S.gguf", "gpt-Q2_K.gguf", "gpt-UD-Q2_K.gguf", "mmproj-F32.gguf", "mmproj-BF16.gguf",
]  # fmt: skip


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
    for prefix in ("hf:", "hf.co/", "huggingface.co/", "https://huggingface.co/"):
        assert parse_reference(f"{prefix}{text}") == model
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


def listed(*paths: str) -> list[RepositoryFile]:
    return [RepositoryFile(path, 1000 + number, f"{number:040x}") for number, path in enumerate(paths)]


def chosen(paths: list[str], choice: Choice) -> tuple[list[str], str | None]:
    found = choose(HubModel("demo/small", choice), listed(*paths))
    return [part.path for part in found.parts], None if found.projector is None else found.projector.path


@pytest.mark.parametrize(
    ("stem", "quantisation"),
    [
        ("smollm2-135m-instruct-q4_k_m", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1", "Q4_1"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("gpt-UD-IQ2_XXS", "UD-IQ2_XXS"),
        ("Llama-Q8_0-embed-Q4_K_M", "Q4_K_M"),
        ("Model-Q4_K_M-imat", "Q4_K_M"),
        ("model-fp16", "F16"),
        ("BF16", "BF16"),
        ("model-TQ1_0", "TQ1_0"),
        ("Model-IQ4_NL", "IQ4_NL"),
        ("Q4", "Q4"),
        ("Qwen3-4B", ""),
        ("GPTQ4-model", ""),
    ],
)
def test_the_quantisation_of_a_name(stem: str, quantisation: str) -> None:
    assert quantisation_of(stem) == quantisation


@pytest.mark.parametrize(
    ("paths", "choice", "parts", "projector"),
    [
        (BARTOWSKI, "Q4_K_M", ["google_gemma-3-4b-it-Q4_K_M.gguf"], "mmproj-google_gemma-3-4b-it-f16.gguf"),
        (BARTOWSKI, "BF16", ["google_gemma-3-4b-it-bf16.gguf"], "mmproj-google_gemma-3-4b-it-f16.gguf"),
        (UNSLOTH, "Q4_K_M", UNSLOTH[2:5], "mmproj-BF16.gguf"),
        (UNSLOTH, "Q4_K_XL", ["gpt-UD-Q4_K_XL.gguf"], "mmproj-BF16.gguf"),
        (UNSLOTH, "UD-Q2_K", ["gpt-UD-Q2_K.gguf"], "mmproj-BF16.gguf"),
        (UNSLOTH, "Q2_K", ["gpt-Q2_K.gguf"], "mmproj-BF16.gguf"),
        (["m-FP16.gguf", "m-q8_0.gguf"], "F16", ["m-FP16.gguf"], None),
        (["Q8_0/model.gguf", "Q4_0/model.gguf", "Q4_0/mmproj.gguf", "mmproj-F16.gguf"], "Q4_0",
         ["Q4_0/model.gguf"], "Q4_0/mmproj.gguf"),
    ],
)  # fmt: skip
def test_a_quantisation_chooses_a_model(paths: list[str], choice: str, parts: list[str], projector: str | None) -> None:
    assert chosen(paths, Quantisation(choice)) == (parts, projector)
    assert chosen(paths[::-1], Quantisation(choice)) == (parts, projector)


def test_a_file_chooses_the_model_that_it_is_a_part_of() -> None:
    assert chosen(UNSLOTH, NamedFile(UNSLOTH[3]))[0] == UNSLOTH[2:5]
    assert chosen(UNSLOTH, NamedFile("gpt-Q2_K.gguf"))[0] == ["gpt-Q2_K.gguf"]


def test_the_only_model_needs_no_choice() -> None:
    paths = ["mmproj-only.gguf", "only.gguf", "x.imatrix.gguf", "config.json"]
    assert chosen(paths, None) == (["only.gguf"], "mmproj-only.gguf")


@pytest.mark.parametrize(("paths", "part"), [(BARTOWSKI, BARTOWSKI[3]), (UNSLOTH, UNSLOTH[2])])
def test_without_a_choice_the_usual_quantisation_is_meant(paths: list[str], part: str) -> None:
    assert chosen(paths, None)[0][0] == part


def test_without_the_usual_quantisation_a_choice_is_needed() -> None:
    for paths in (["m-Q4_0.gguf", "m-Q8_0.gguf"], ["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"]):
        assert failing(paths, None).problem is FetchProblem.AMBIGUOUS


def failing(paths: list[str], choice: Choice) -> FetchError:
    with pytest.raises(FetchError) as failed:
        chosen(paths, choice)
    return failed.value


def test_several_models_of_one_quantisation_are_told_apart_by_their_files() -> None:
    error = failing(["a-1b-Q4_0.gguf", "a-3b-Q4_0.gguf", "a-3b-Q8_0.gguf"], Quantisation("Q4_0"))
    assert error.problem is FetchProblem.AMBIGUOUS
    assert "a-1b-Q4_0.gguf (1.0 kB), a-3b-Q4_0.gguf (1.0 kB)" in str(error)
    assert "Q8_0" not in str(error)


def test_projectors_are_never_models() -> None:
    projectors = ["mmproj-F16.gguf", "x/model-mmproj-Q8_0.gguf"]
    assert failing(projectors, None).problem is FetchProblem.NO_MODEL
    assert failing(projectors, Quantisation("Q8_0")).problem is FetchProblem.NO_MODEL
    for path in projectors:
        assert failing([*projectors, "m-Q8_0.gguf"], NamedFile(path)).problem is FetchProblem.IS_PROJECTOR
    assert models_in(listed(*projectors)) == []


def test_parts_of_two_models_are_not_mixed() -> None:
    paths = ["m-Q4_0-00001-of-00002.gguf", "m-Q4_0-00002-of-00003.gguf"]
    error = failing(paths, NamedFile(paths[0]))
    assert error.problem is FetchProblem.MISSING_PARTS
    assert "has 1 of the 2 parts" in str(error)


def test_what_a_listing_offers_chooses_the_same_model() -> None:
    for paths in (BARTOWSKI, UNSLOTH, ["a-1b-Q4_0.gguf", "a-3b-Q4_0.gguf", "plain.gguf"]):
        found = models_in(listed(*paths))
        assert found
        for label, _quantisation, files in found:
            choice = NamedFile(label) if label.endswith(".gguf") else Quantisation(label)
            assert choose(HubModel("demo/small", choice), listed(*paths)) == files


def test_sizes_are_read_by_people() -> None:
    sizes = {0: "0 bytes", 999: "999 bytes", 1000: "1.0 kB", 98_362_432: "98.4 MB", 999_999_999: "1.0 GB"}
    assert {size: size_text(size) for size in sizes} == sizes
    assert size_text(70 * 10**12) == "70000.0 GB"


@pytest.mark.parametrize(
    ("path", "title"),
    [
        ("gemma-3-4b-it-Q4_K_M.gguf", "gemma-3-4b-it"),
        ("folder/Qwen2-VL.Q8_0.gguf", "Qwen2-VL"),
        ("big-UD-Q2_K_XL-00001-of-00003.gguf", "big"),
        ("tiny.gguf", "tiny"),
    ],
)
def test_a_title_is_a_name_without_quantisation(path: str, title: str) -> None:
    assert title_of(path) == title


_MODEL = "gemma-3-4b-it-Q4_K_M.gguf"


@pytest.mark.parametrize(
    ("others", "projector"),
    [
        ([], None),
        (["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
        # Its own quantisations are no other models.
        (["gemma-3-4b-it-Q8_0.gguf", "mmproj-F32.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
        (["qwen-7b-Q4_K_M.gguf", "mmproj-F16.gguf"], None),
        (["qwen-7b-Q4_K_M.gguf", "qwen-mmproj.gguf", "mmproj-gemma-3-4b-it-F16.gguf"], "mmproj-gemma-3-4b-it-F16.gguf"),
        (["mmproj-F16.safetensors"], None),
    ],
)
def test_the_projector_of_a_model_is_beside_it(tmp_path: Path, others: Sequence[str], projector: str | None) -> None:
    for name in (_MODEL, *others):
        (tmp_path / name).touch()
    found = local_projector(tmp_path / _MODEL)
    assert found == (None if projector is None else tmp_path / projector)


def test_files_that_are_no_models_have_no_projector(tmp_path: Path) -> None:
    (tmp_path / "mmproj.gguf").touch()
    assert local_projector(tmp_path / "mmproj.gguf") is None
    assert local_projector(tmp_path / "missing.gguf") is None
    (tmp_path / "part-00002-of-00003.gguf").touch()
    assert local_projector(tmp_path / "part-00002-of-00003.gguf") is None
