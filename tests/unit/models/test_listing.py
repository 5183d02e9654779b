"""Which files of a repository are the model that is asked for."""

import pytest

from caravan_models.errors import FetchError, FetchProblem
from caravan_models.listing import RepositoryFile, choose, models_in, quantisation_of, size_text
from caravan_models.reference import Choice, HubModel, NamedFile, Quantisation

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
