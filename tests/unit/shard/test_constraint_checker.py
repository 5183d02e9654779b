"""The process that checks constraints ends while nobody asks it, on the event loop that a shard has."""

import uvloop

from caravan_proto.messages.constraint import Constraint, ConstraintKind
from caravan_shard.backends.toy.model import TOY_FACTS, ToyVocabulary
from caravan_shard.constraints.compiler import Checker
from caravan_shard.constraints.grammar import Problem
from caravan_shard.constraints.tokenizer import ConstraintTokenizer


def test_a_process_of_which_only_the_pipe_is_known_to_be_closed_loses_no_constraint() -> None:
    """A process that is killed closes its pipes first, and may be asked before its status is known."""

    async def check() -> Problem | None:
        checker = Checker(ConstraintTokenizer.of(ToyVocabulary(), TOY_FACTS).table)
        try:
            assert await checker.check(Constraint(ConstraintKind.REGEX, "a")) is None
            process = checker._process
            assert process is not None
            assert process.stdin is not None
            process.stdin.close()
            return await checker.check(Constraint(ConstraintKind.REGEX, "("))
        finally:
            await checker.close()

    assert uvloop.run(check()) is not None
