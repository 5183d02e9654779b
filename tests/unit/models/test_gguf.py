"""The header of a GGUF file is read as the writers of the format mean it, and nothing else is believed."""

import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_models import gguf_facts, gguf_header
from caravan_models.errors import FetchError, FetchProblem
from caravan_models.gguf_header import read_header
from caravan_shard.backends.llama.model.loading import _FILE_TYPES
from caravan_testing.gguf_file import fields_of, tensors_of
from caravan_testing.shard_models import DEMO_MODEL
from caravan_testing.shard_tiny_llama import write_tiny_llama
from caravan_testing.stand_in_hub import small_gguf


def test_a_real_model_says_what_it_is() -> None:
    facts = gguf_facts.gguf_facts([DEMO_MODEL])
    assert (facts.architecture, facts.parameter_count, facts.quantisation) == ("llama", 134_515_008, "Q4_1")
    assert (facts.trained_context, facts.layer_count) == (8192, 30)


def test_every_type_of_value_is_read(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 255)
    writer.add_int64("i64", -(2**63))
    writer.add_float64("f64", 0.5)
    writer.add_bool("flag", True)
    writer.add_string("text", "Zoë")
    writer.add_array("texts", ["a", "bb"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("many", list(range(65)))
    writer.add_uint32("last", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    header = read_header(path)
    assert (header.lists, header.list_lengths) == ({"numbers": (1, 2, 3)}, {"texts": 2, "numbers": 3, "many": 65})
    assert header.metadata == {
        "general.architecture": "llama", "u8": 255, "i64": -(2**63), "f64": 0.5, "flag": True, "text": "Zoë", "last": 7,
    }  # fmt: skip


@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(0, 400))
def test_texts_of_a_list_are_passed_by(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], cut: int) -> None:
    """Wherever the blocks end in which they are read, and wherever the file does."""
    path = tmp_path_factory.getbasetemp() / "texts.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("texts", ["x" * length for length in lengths])
    writer.add_uint32("last", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_header, "_BLOCK_BYTES", 16)
        header = read_header(path)
        assert (header.list_lengths, header.metadata["last"]) == ({"texts": len(lengths)}, 7)
        size = path.stat().st_size
        path.write_bytes(path.read_bytes()[:cut])
        if cut < size:
            with pytest.raises(FetchError):
                read_header(path)


def test_the_reader_of_the_tests_reads_what_that_of_the_format_does(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    expected = gguf.GGUFReader(path)
    fields = {key: field for key, field in expected.fields.items() if not key.startswith("GGUF.")}
    assert {key: field.value for key, field in fields_of(path).items()} == {
        key: field.contents() for key, field in fields.items()
    }
    tensors = tensors_of(path)
    assert list(tensors) == [tensor.name for tensor in expected.tensors]
    for tensor in expected.tensors:
        assert (tensors[tensor.name].kind, tensors[tensor.name].place) == (tensor.tensor_type, tensor.data_offset)
        assert np.array_equal(tensors[tensor.name].values(), tensor.data)


@pytest.mark.parametrize("alignment", [32, 64])
def test_tensors_are_where_the_header_says(alignment: int, tmp_path: Path) -> None:
    path = tmp_path / "tensors.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(alignment)
    writer.add_tensor("some", np.ones((2, 3), np.float32))
    writer.add_tensor("others", np.arange(5, dtype=np.int64))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(path)
    assert {name: tensor.lengths for name, tensor in header.tensors.items()} == {"some": (3, 2), "others": (5,)}
    assert header.parameter_count == 11
    others = header.tensors["others"]
    assert others.kind == gguf.GGMLQuantizationType.I64
    assert np.fromfile(path, "<i8", 5, offset=others.start).tolist() == [0, 1, 2, 3, 4]


def test_the_names_of_file_types_are_those_of_llama_cpp() -> None:
    guessed = 1024
    assert {number: name for number, name in _FILE_TYPES.items() if number != guessed} == gguf_facts._FILE_TYPES


@pytest.mark.parametrize(
    "data",
    [
        b"", b"GGU", b"GGML" + bytes(20), b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
        b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62),
    ],
)  # fmt: skip
def test_what_is_no_gguf_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(FetchError, match="no whole GGUF file") as failed:
        read_header(path)
    assert failed.value.problem is FetchProblem.NOT_GGUF


@given(st.integers(0, 150), st.binary(max_size=60))
def test_a_damaged_header_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, cut: int, rest: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(small_gguf(200)[:cut] + rest)
    with contextlib.suppress(FetchError):
        read_header(path)
