"""Misuse from two threads is an error, and nothing that was closed stays: no thread, file, object or memory."""

import gc
import os
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import caravan
from caravan import LLM, Conversation, Executor, Picture, SamplingParams
from caravan_shard.backends.toy.backend import ToyBackend
from caravan_testing.shard_tiny_llama import write_tiny_llama
from caravan_testing.waiting import eventually

_SMALL = {"backend": "fake", "ctx_size": 64, "parallel": 4, "batch_size": 16, "cache_ram": 0}
# The cells of the tiny model have 64 MiB, which malloc gives back at once. 16 leaked contexts have five times the
# bound, which leaves room for smaller blocks that malloc keeps for other threads.
_CELLS = 131_072
_MOST_GROWTH_BYTES = 200 << 20


def _executor() -> Executor:
    return Executor("toy.gguf", **_SMALL)  # type: ignore[arg-type]


def _calls(executor: Executor, conversation: Conversation) -> dict[str, Callable[[], object]]:
    """Return every call that a user can make."""
    return {
        "create": executor.create,
        "infer": executor.infer,
        "save": lambda: executor.save("nowhere"),
        "load": lambda: executor.load(b""),
        "tokenize": lambda: executor.tokenize("a"),
        "close": executor.close,
        "conversation.prompt": lambda: conversation.prompt("a"),
        "conversation.prompt_messages": lambda: conversation.prompt_messages([{"role": "user", "content": "a"}]),
        "conversation.logits": conversation.logits,
        "conversation.sample": conversation.sample,
        "conversation.generate": lambda: list(conversation.generate(1)),
        "conversation.text": lambda: conversation.text,
        "conversation.fork": conversation.fork,
        "conversation.rewind": lambda: conversation.rewind(1),
        "conversation.shift_left": lambda: conversation.shift_left(1),
        "conversation.modify": lambda: conversation.modify(lambda tokens: tokens[:1]),
        "conversation.remove": lambda: conversation.remove(Picture.of(1, 1, bytes(3))),
        "conversation.unload": conversation.unload,
        "conversation.save": conversation.save,
        "conversation.close": conversation.close,
    }


def test_a_second_thread_is_refused_and_disturbs_nothing() -> None:
    """One thread writes a text; another one makes every call, over and over."""
    params = SamplingParams(temperature=0, logit_bias={257: -100.0})
    with _executor() as executor, executor.create() as conversation:
        conversation.prompt("text")
        calls = _calls(executor, conversation)
        refused = dict.fromkeys(calls, 0)
        done, errors = threading.Event(), list[BaseException]()

        def misuse() -> None:
            try:
                while not done.is_set():
                    for name, call in calls.items():
                        with pytest.raises(caravan.WrongThreadError):
                            call()
                        refused[name] += 1
            except BaseException as error:
                errors.append(error)

        def write() -> list[int]:
            written = [token.id for token in conversation.generate(40, params)]
            conversation.rewind(40)
            conversation.prompt([])
            return written

        expected = write()
        thread = threading.Thread(target=misuse)
        thread.start()
        try:
            while not errors and min(refused.values()) < 10:
                assert write() == expected
        finally:
            done.set()
            thread.join()
        assert errors == []
        assert write() == expected


def test_every_call_is_tried_above() -> None:
    internal = {"check", "share", "trim", "end", "save_all", "open"}
    internal |= {"advance", "note_held", "saved", "restore", "generation", "steps"}
    names = [name for name, member in vars(Executor).items() if callable(member)]
    names += [f"conversation.{name}" for name, member in vars(Conversation).items() if callable(member)]
    public = {name for name in names if not name.rpartition(".")[2].startswith("_")}
    with _executor() as executor:
        tried = set(_calls(executor, executor.create()))
    assert {name for name in public if name.rpartition(".")[2] not in internal} == tried - {"conversation.text"}


def test_a_thousand_conversations_leave_nothing() -> None:
    with _executor() as executor:
        made: weakref.WeakSet[Conversation] = weakref.WeakSet()

        def cycle(number: int) -> None:
            with executor.create() as conversation:
                conversation.prompt([number % 200, 1, 2])
                executor.infer()
                with conversation.fork() as other:
                    other.prompt(other.sample())
                    executor.infer()
            made.update((conversation, other))

        for number in range(1000):
            cycle(number)
        gc.collect()
        assert (len(made), executor.conversations) == (0, ())
        backend = executor.backend
        assert isinstance(backend, ToyBackend)
        assert [backend.length(number) for number in range(4)] == [0] * 4
        assert backend.cache.used == 0


def _llm(options: dict[str, Any]) -> None:
    with LLM(**options) as llm:
        llm.generate("p", SamplingParams(temperature=0, max_tokens=2))


def _executed(options: dict[str, Any]) -> None:
    with Executor(**options) as executor:
        executor.create().prompt("p")
        executor.infer()


@pytest.mark.parametrize("opened", [_llm, _executed])
async def test_opening_and_closing_leaves_nothing(opened: Callable[[dict[str, Any]], None], tmp_path: Path) -> None:
    """The tiny model of llama.cpp has threads, files and memory of its own."""
    options = {"model": write_tiny_llama(tmp_path / "tiny.gguf"), "ctx_size": _CELLS, "ubatch_size": 32}
    options |= {"parallel": 2, "cache_ram": 0, "threads": 1}
    for _ in range(4):
        opened(options)
    before = _rss_bytes()
    threads, files = _count("task"), _count("fd")
    for _ in range(16):
        opened(options)
    gc.collect()
    # The kernel forgets a thread shortly after it is joined.
    await eventually(lambda: _count("task") <= threads, "no more threads than before")
    await eventually(lambda: _count("fd") <= files, "no more open files than before")
    assert _rss_bytes() - before < _MOST_GROWTH_BYTES


def _count(what: str) -> int:
    return len(os.listdir(f"/proc/self/{what}"))


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
