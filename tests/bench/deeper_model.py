"""Writes a model that is slower and computes the same: `PYTHONPATH=tests python -m bench.deeper_model MODEL OUT`.

Its layers stand there ``--times`` over. The copies add nothing, since the matrices with which they would add
(``attn_output`` and ``ffn_down``) are zero, but take the time of a layer. With the model itself as its draft model
(`bench.draft_gain OUT -md MODEL`) this shows what the drafts of a model are worth that is so many times as fast and as
right as can be; with a requantisation of the model, of one that is sometimes wrong.
"""

import argparse
import re
from collections.abc import Iterator

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.gguf_reader import ReaderTensor
from numpy.typing import NDArray

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_ADDING = ("attn_output.weight", "ffn_down.weight")


def copies(tensor: ReaderTensor, layers: int, times: int) -> Iterator[tuple[str, NDArray[np.generic]]]:
    """Return the names and the data under which ``tensor`` is written, of a model of ``layers`` layers."""
    yield tensor.name, tensor.data
    if (match := _LAYER.fullmatch(tensor.name)) is not None:
        number, part = int(match[1]), match[2]
        # In each type, zero bytes are zeros: the scales are zero.
        data = np.zeros_like(tensor.data) if part in _ADDING else tensor.data
        for copy in range(1, times):
            yield f"blk.{copy * layers + number}.{part}", data


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("--times", type=int, default=10)
    arguments = parser.parse_args()
    reader = GGUFReader(arguments.model)
    architecture = str(reader.fields["general.architecture"].contents())
    counted = f"{architecture}.block_count"
    layers = int(reader.fields[counted].contents())
    writer = GGUFWriter(arguments.out, architecture)
    for key, found in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = layers * arguments.times if key == counted else found.contents()
        of = found.types[-1] if found.types[0] is GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, found.types[0], of)
    for tensor in reader.tensors:
        for name, data in copies(tensor, layers, arguments.times):
            writer.add_tensor(name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
