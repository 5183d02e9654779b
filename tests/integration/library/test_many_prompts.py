"""Long lists of prompts over the toy model: what is tokenized when, and that nothing runs if one is wrong."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

import caravan
from caravan import RequestOutput, SamplingParams, local_model
from caravan.local_model import LocalModel
from caravan.prompts import ChatCall
from caravan_shard.service.text import TextService
from caravan_testing.waiting import eventually

_GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def _fail(failure: BaseException) -> None:
    raise failure


@asynccontextmanager
async def opened(**options: Any) -> AsyncIterator[LocalModel]:
    model = LocalModel("toy.gguf", {"backend": "fake", "ctx_size": 1024, "parallel": 4} | options)
    await model.open(_fail)
    try:
        yield model
    finally:
        await model.close()


class Texts:
    """Counts what is tokenized. Texts for which ``held`` is true wait for ``release``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, held: Callable[[str], bool] = lambda _text: False) -> None:
        self.release = asyncio.Event()
        self.asked: list[str] = []
        self.waiting = 0
        tokenize = TextService.tokenize

        async def counted(service: TextService, text: str, **options: bool) -> Any:
            self.asked.append(text)
            if held(text):
                self.waiting += 1
                await self.release.wait()
            return await tokenize(service, text, **options)

        monkeypatch.setattr(TextService, "tokenize", counted)


async def test_the_first_prompts_end_before_the_last_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, ended = Texts(monkeypatch, lambda text: text == "prompt 39"), list[RequestOutput]()
    prompts = [f"prompt {number}" for number in range(40)]
    async with opened() as model:
        call = asyncio.create_task(model.generate(prompts, [_GREEDY] * 40, "", ended.append))
        await eventually(lambda: len(ended) == 39, "all but the last have ended")
        assert texts.waiting == 1
        texts.release.set()
        assert [output.prompt for output in await call] == prompts


@pytest.mark.parametrize("name", ["generate", "embed"])
async def test_prompts_are_tokenized_together(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    texts = Texts(monkeypatch, lambda _text: True)
    prompts = [f"prompt {number}" for number in range(20)]
    more = {"generate": ([_GREEDY] * 20, "", lambda _output: None), "embed": ()}[name]
    async with opened(embeddings=True) as model:
        call = asyncio.create_task(getattr(model, name)(prompts, *more))
        await eventually(lambda: texts.waiting == 4, "four texts are tokenized at a time")
        texts.release.set()
        assert len(await call) == 20


async def test_few_prompts_are_tokenized_before_others_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_model, "_MAX_SUBMITTED", 4)
    texts = Texts(monkeypatch)
    prompts = [f"prompt {number}" for number in range(100)]
    endless = SamplingParams(temperature=0, max_tokens=9000, ignore_eos=True)
    async with opened(ctx_size=40_000, fake_step_ms=5.0) as model:
        call = asyncio.create_task(model.generate(prompts, [endless] * 100, "", lambda _output: None))
        # Four run, one waits for its turn, and seven more are tokenized ahead of it.
        await eventually(lambda: len(texts.asked) == 12, "the look-ahead is used")
        await asyncio.sleep(0.1)
        assert texts.asked == prompts[:12]
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        # Every turn was given back.
        assert len(await model.generate(prompts, [_GREEDY] * 100, "", lambda _output: None)) == 100


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("", "prompt 30: `prompt` cannot be empty"),
        ("x" * 1100, "prompt 30: `prompt` tokens"),
        ((1, 9999), "prompt 30: `prompt` token ids must be"),
    ],
)
async def test_nothing_runs_if_a_prompt_is_wrong(monkeypatch: pytest.MonkeyPatch, wrong: Any, message: str) -> None:
    ran = list[object]()
    monkeypatch.setattr(local_model, "started", lambda *args: ran.append(args))
    prompts = [f"prompt {number}" for number in range(40)]
    prompts[30] = wrong
    async with opened() as model:
        with pytest.raises(caravan.RequestError) as refused:
            await model.generate(prompts, [_GREEDY] * 40, "", lambda _output: None)
    assert message in str(refused.value)
    assert not ran


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (SamplingParams(max_tokens=2000), "prompt 5: `prompt` tokens + `max_tokens`"),
        (SamplingParams(stop_token_ids=[9999]), "prompt 5: `stop_token_ids`"),
        (
            SamplingParams(structured_outputs=caravan.StructuredOutputsParams(regex="(")),
            "prompt 5: ",
        ),
    ],
)
async def test_nothing_runs_if_parameters_are_wrong(
    monkeypatch: pytest.MonkeyPatch, wrong: SamplingParams, message: str
) -> None:
    ran = list[object]()
    monkeypatch.setattr(local_model, "started", lambda *args: ran.append(args))
    async with opened() as model:
        with pytest.raises(caravan.RequestError) as refused:
            await model.generate(["p"] * 8, [*[_GREEDY] * 5, wrong, wrong, _GREEDY], "", lambda _output: None)
    assert str(refused.value).startswith(message)
    assert not ran


async def test_conversations_are_rendered_together_and_none_runs_if_one_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = Texts(monkeypatch, lambda text: "held" in text)
    conversations: list[list[dict[str, Any]]] = [[{"role": "user", "content": "held"}] for _ in range(6)]
    async with opened(ctx_size=4096) as model:
        call = asyncio.create_task(model.chat(conversations, [_GREEDY] * 6, ChatCall({}), lambda _output: None))
        await eventually(lambda: texts.waiting == 4, "four prompts are tokenized at a time")
        texts.release.set()
        assert len(await call) == 6
        monkeypatch.setattr(local_model, "started", lambda *_: pytest.fail("a conversation ran"))
        conversations[4] = [{"role": "user"}]
        with pytest.raises(caravan.RequestError, match="conversation 4: "):
            await model.chat(conversations, [_GREEDY] * 6, ChatCall({}), lambda _output: None)
