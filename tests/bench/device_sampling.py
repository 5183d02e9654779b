"""Compares drawing from candidates that llama.cpp finds with drawing from all logits, on this machine's device.

    PYTHONPATH=tests .venv/bin/python -m bench.device_sampling MODEL [--draws 10000] [flags of caravan-shard]

Prints how many draws were equal, and the time of a step, draws included, both ways. Ends with 1 if any draw differed.
"""

import argparse
import sys
from dataclasses import replace

from caravan_proto.flags import load
from caravan_shard.backends.llama.backend import LlamaCppBackend
from caravan_shard.backends.llama.sampling.candidates import CandidateProbe
from caravan_shard.config import ShardConfig


def main() -> int:
    """Run the probe of the shard's start for longer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--draws", type=int, default=10_000)
    arguments, flags = parser.parse_known_args()
    given = load(ShardConfig, prog="bench.device_sampling", description="", argv=["-m", arguments.model, *flags])
    backend = LlamaCppBackend(replace(given, backend_sampling="off"))
    try:
        probe = CandidateProbe(backend)
        found = probe.run(rounds=-(-arguments.draws // probe.draws_of_a_round))
    finally:
        backend.close()
    print(f"{arguments.model}, vocabulary of {backend.facts.vocabulary_size}, {found.rows} rows a step")
    print(f"{found.draws} draws from candidates and from all logits: {found.draws - found.left - found.unequal} equal,")
    print(f"  {found.unequal} different, {found.left} left to all logits")
    with_ms, without_ms = found.seconds_with * 1e3, found.seconds_without * 1e3
    print(f"a step with candidates {with_ms:.3f} ms, with all logits {without_ms:.3f} ms (medians)")
    print(f"--backend-sampling auto would use candidates on a GPU: {found.is_faster and not found.unequal}")
    return 1 if found.unequal else 0


if __name__ == "__main__":
    sys.exit(main())
