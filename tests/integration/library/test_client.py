"""`Client` and `AsyncClient` over `caravan serve`: outputs equal those of `LLM`, and a call that ends, ends there."""

import asyncio
import gc
import json
import signal
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

import caravan
from caravan import LLM, AsyncClient, Client, RequestOutput, SamplingParams, StructuredOutputsParams
from caravan.client import (
    Delete,
    HeadMovedError,
    Insert,
    InvalidRequestError,
    NotFoundError,
    Replace,
    ServedConversation,
    ServerDeadlineError,
)
from caravan_shard.backends.toy.model import BOS
from caravan_testing.serve_process import Served, serve
from caravan_testing.waiting import DEADLINE_S, eventually, wait_until

_GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_SHORT = SamplingParams(temperature=0, max_tokens=8)
_HELLO = [{"role": "user", "content": "Hello"}]
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "roll",
        "parameters": {
            "type": "object",
            "properties": {"n": {"enum": [1, 2]}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    flags = ("--backend", "fake", "--parallel", "4", "--ctx-size", "8192", "--max-top-n-tokens", "32")
    with serve(*flags, models=("toy.gguf",)) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as made:
        yield made


@pytest.fixture
async def async_client(served: Served) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(served.url) as made:
        yield made


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("toy.gguf", backend="fake", parallel=4, ctx_size=8192) as opened:
        yield opened


def _plain(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Return outputs without what depends on what ran before, and without what HTTP does not say."""
    return [
        replace(
            output,
            request_id="",
            num_cached_tokens=0,
            outputs=[
                replace(one, stop_reason=None, tool_calls=[replace(call, id="") for call in one.tool_calls])
                for one in output.outputs
            ],
        )
        for output in outputs
    ]


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        (["a", "b c", "ö"], _GREEDY),
        ([BOS, 97], _GREEDY),
        ({"prompt": "one"}, SamplingParams(seed=1)),
        ("drawn", SamplingParams(n=3, seed=11, max_tokens=16, temperature=1.3, top_p=0.9, top_k=30, min_p=0.01)),
        ("logs", SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=0, prompt_logprobs=2)),
        ("choices", SamplingParams(seed=4, max_tokens=8, choice_parameters=[{}, {"temperature": 0.1}, {"seed": 9}])),
        ("best", SamplingParams(n=2, best_of=4, seed=11, max_tokens=8, ignore_eos=True)),
        ("beams", SamplingParams(n=3, max_tokens=6, use_beam_search=True, ignore_eos=True, logprobs=0)),
        ("sure?", SamplingParams(seed=3, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))),
        ("stop", SamplingParams(seed=3, max_tokens=60, stop=["e", "9"], logit_bias={101: 2.0}, stop_token_ids=[55])),
        (["x", "y"], [SamplingParams(seed=1), SamplingParams(max_tokens=3, priority=5, timeout=60, top_k=1)]),
        ([], None),
    ],
)  # fmt: skip
def test_outputs_are_those_of_a_model_of_ones_own(client: Client, llm: LLM, prompts: Any, params: Any) -> None:
    assert _plain(client.generate(prompts, params)) == _plain(llm.generate(prompts, params))


def test_each_choice_has_parameters_of_its_own(client: Client, llm: LLM) -> None:
    alone = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
    params = replace(alone, choice_parameters=[{}, {"temperature": 0.0}])
    for model in (client, llm):
        drawn, greedy = model.generate("choices", params)[0].outputs
        assert drawn.text == model.generate("choices", alone)[0].outputs[0].text
        assert greedy.text == model.generate("choices", replace(alone, temperature=0))[0].outputs[0].text


def test_the_parts_of_a_stream_are_the_output(client: Client) -> None:
    params = SamplingParams(n=2, seed=5, max_tokens=20, ignore_eos=True, logprobs=0)
    (whole,) = client.generate("a prompt to stream", params)
    parts = list(client.stream("a prompt to stream", params))
    for index in range(2):
        mine = [part.outputs[0] for part in parts if part.outputs[0].index == index]
        assert "".join(part.text for part in mine) == whole.outputs[index].text
        assert [token for part in mine for token in part.token_ids] == whole.outputs[index].token_ids
        assert [entry for part in mine for entry in part.logprobs or ()] == whole.outputs[index].logprobs
        assert [part.finish_reason for part in mine] == [None] * (len(mine) - 1) + ["length"]
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert {tuple(part.prompt_token_ids) for part in parts} == {tuple(whole.prompt_token_ids)}
    assert parts[-1].num_cached_tokens > 10
    assert len({part.request_id for part in parts}) == 1


def test_a_chat_answers_as_a_model_of_ones_own(client: Client, llm: LLM) -> None:
    params = SamplingParams(seed=2, max_tokens=10, n=2, logprobs=0)
    assert _plain(client.chat([_HELLO, _HELLO], params)) == _plain(llm.chat([_HELLO, _HELLO], params))
    best = replace(params, n=1, best_of=3)
    assert _plain(client.chat(_HELLO, best)) == _plain(llm.chat(_HELLO, best))
    (whole,) = client.chat(_HELLO, params)
    parts = list(client.stream_chat(_HELLO, params))
    for index in range(2):
        mine = [part.outputs[0] for part in parts if part.outputs[0].index == index]
        assert "".join(part.text for part in mine) == whole.outputs[index].text
    assert parts[-1].finished


def test_a_chat_has_schemas_and_tools(client: Client) -> None:
    (answer,) = client.chat(_HELLO, SamplingParams(seed=1, max_tokens=60), schema=_SCHEMA)
    assert set(json.loads(answer.outputs[0].text)) == {"ok"}
    params = SamplingParams(temperature=0, max_tokens=200)
    (answer,) = client.chat(_HELLO, params, tools=[_TOOL], tool_choice="roll")
    (call,) = answer.outputs[0].tool_calls
    assert (call.name, answer.outputs[0].finish_reason) == ("roll", "tool_calls")
    *earlier, last = client.stream_chat(_HELLO, params, tools=[_TOOL], tool_choice="roll")
    assert not any(part.outputs[0].tool_calls for part in earlier)
    assert [(one.name, one.arguments) for one in last.outputs[0].tool_calls] == [(call.name, call.arguments)]


async def test_the_async_client_does_the_same(async_client: AsyncClient, client: Client) -> None:
    first, second = await asyncio.gather(async_client.generate("a", _GREEDY), async_client.chat(_HELLO, _GREEDY))
    assert _plain(first) == _plain(await asyncio.to_thread(client.generate, "a", _GREEDY))
    assert _plain(second) == _plain(await asyncio.to_thread(client.chat, _HELLO, _GREEDY))
    texts = [part.outputs[0].text async for part in async_client.stream("a", _GREEDY)]
    assert "".join(texts) == first[0].outputs[0].text
    texts = [part.outputs[0].text async for part in async_client.stream_chat(_HELLO, _GREEDY)]
    assert "".join(texts) == second[0].outputs[0].text
    made = await async_client.create_conversation(metadata={"made": "here"})
    response = await made.respond("Hello", _SHORT)
    parts = [part async for part in made.stream("Again", _SHORT)]
    same = await async_client.conversation(made.id)
    assert same == await made.refresh()
    assert same.head != made.head
    copied = await async_client.import_conversation(await same.export())
    assert [item["id"] for item in await copied.items()][1] == response.items[0]["id"]
    assert parts[-1].response is not None
    assert (await (await same.rewind(turns=1)).items())[-1] == response.items[0]
    await same.delete()
    with pytest.raises(NotFoundError):
        await same.refresh()


def _texts(conversation: ServedConversation) -> list[str]:
    return [item["content"][0]["text"] for item in conversation.items()]


def test_a_conversation_answers_whole_and_streamed(client: Client) -> None:
    conversation = client.create_conversation([{"role": "system", "content": "Be kind."}], metadata={"by": "test"})
    assert (conversation.metadata, conversation.created_at > 1e9) == ({"by": "test"}, True)
    first = conversation.respond("Hello", _SHORT, metadata={"turn": "1"})
    assert (first.status, first.incomplete_reason) in {("incomplete", "max_output_tokens"), ("completed", "")}
    assert (first.model, first.reasoning, first.tool_calls, first.left_out) == ("toy.gguf", "", [], [])
    assert len(first.request_id) == 32
    head, *middle, last = conversation.stream([{"role": "user", "content": "More"}], _SHORT)
    assert (head.text, head.response, last.text) == ("", None, "")
    assert last.response is not None
    assert "".join(part.text for part in middle) == last.response.text
    assert {part.response_id for part in (head, *middle, last)} == {last.response.id}
    assert _texts(conversation) == ["Be kind.", "Hello", first.text, "More", last.response.text]
    usage = last.response.usage
    assert 0 < usage.cached_tokens < usage.input_tokens
    assert usage.output_tokens <= 8


def test_a_conversation_is_forked_rewound_shifted_and_edited(client: Client) -> None:
    conversation = client.create_conversation([{"role": "system", "content": "s"}])
    added = conversation.add_items([{"role": "user", "content": text} for text in "abcd"])
    fork = conversation.fork(metadata={"a": "fork"})
    early = conversation.fork(added[1]["id"])
    assert (_texts(fork), _texts(early)) == (list("sabcd"), list("sab"))
    assert (fork.metadata, early.metadata) == ({"a": "fork"}, {})
    assert _texts(conversation.rewind(to=added[2]["id"])) == list("sabc")
    # Messages of the user that follow each other are one turn.
    assert _texts(conversation.rewind(turns=1)) == ["s"]
    assert _texts(fork.shift(2, keep=1)) == list("sad")
    new = {"role": "user", "content": "n"}
    operations: list[Insert | Replace | Delete] = [
        Insert(items=[new]),
        Replace(item=added[0]["id"], items=[new, new]),
        Insert(items=[new], after=added[3]["id"]),
        Delete(item=added[3]["id"]),
    ]
    assert _texts(fork.edit(operations)) == list("nsnnn")
    assert fork.item(fork.items()[1]["id"])["content"][0]["text"] == "s"
    assert _texts(fork.delete_item(fork.items()[1]["id"])) == list("nnnn")
    assert fork.update({"k": "v"}).metadata == {"k": "v"}
    assert client.conversation(fork.id).metadata == {"k": "v"}
    fork.delete()
    with pytest.raises(NotFoundError):
        fork.items()


def test_what_a_rewound_conversation_generates_is_generated_again(client: Client) -> None:
    conversation = client.create_conversation()
    first = conversation.respond("Hello", _SHORT)
    conversation.rewind(turns=1)
    again = conversation.respond("Hello", _SHORT)
    assert again.text == first.text
    assert again.usage.cached_tokens > 0


def test_an_export_is_a_conversation_elsewhere(client: Client) -> None:
    conversation = client.create_conversation(metadata={"k": "v"})
    conversation.respond("Hello", _SHORT)
    export = conversation.export()
    assert (len(export.token_ids) > 20, export.fingerprint, export.metadata) == (True, "toy-toy.gguf", {"k": "v"})
    same, other = client.import_conversation(export), client.import_conversation(export, metadata={})
    assert (same.metadata, other.metadata) == ({"k": "v"}, {})
    assert same.items() == conversation.items()
    assert same.export() == export
    empty = client.create_conversation().export()
    assert (empty.items, empty.fingerprint, empty.token_ids) == ([], "", ())
    assert client.import_conversation(empty).items() == []


def test_all_items_come_however_many_pages_they_have(client: Client) -> None:
    texts = [str(number) for number in range(230)]
    conversation = client.create_conversation([{"role": "user", "content": text} for text in texts])
    assert _texts(conversation) == texts


def test_a_change_needs_the_head_that_it_expects(client: Client) -> None:
    conversation = client.create_conversation([{"role": "user", "content": "a"}])
    stale = conversation.head
    conversation.add_items([{"role": "user", "content": "b"}], if_match=stale)
    item = conversation.items()[0]["id"]
    changes: list[Callable[[], object]] = [
        lambda: conversation.rewind(turns=1, if_match=stale),
        lambda: conversation.shift(1, if_match=stale),
        lambda: conversation.edit([Delete(item=item)], if_match=stale),
        lambda: conversation.update({}, if_match=stale),
        lambda: conversation.add_items([], if_match=stale),
        lambda: conversation.delete_item(item, if_match=stale),
        lambda: conversation.delete(if_match=stale),
    ]
    for change in changes:
        with pytest.raises(HeadMovedError) as moved:
            change()
        assert (moved.value.details.status, moved.value.details.code) == (409, "head_moved")
    assert _texts(conversation) == ["a", "b"]
    fresh = conversation.refresh()
    assert fresh.rewind(turns=1, if_match=fresh.head).head != fresh.head


def test_a_response_has_a_schema_and_tools(client: Client) -> None:
    conversation = client.create_conversation()
    long = SamplingParams(seed=1, max_tokens=200)
    assert set(json.loads(conversation.respond("?", long, schema=_SCHEMA).text)) == {"ok"}
    params = replace(long, structured_outputs=StructuredOutputsParams(json=json.dumps(_SCHEMA)))
    assert set(json.loads(conversation.respond("?", params).text)) == {"ok"}
    tool = {"type": "function", **_TOOL["function"]}  # type: ignore[dict-item]
    response = conversation.respond("Roll", long, tools=[tool], tool_choice={"type": "function", "name": "roll"})
    (call,) = response.tool_calls
    assert call.name == "roll"
    output = {"type": "function_call_output", "call_id": call.id, "output": "4"}
    assert conversation.respond([output], _SHORT, tools=[tool]).status in {"completed", "incomplete"}


@pytest.mark.parametrize(
    ("params", "options", "error", "message"),
    [
        (SamplingParams(n=2, stop="x", logprobs=0), {}, caravan.RequestError, "parameters: n, stop, logprobs"),
        (SamplingParams(choice_parameters=[{}]), {}, caravan.RequestError, "choice_parameters"),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a")),
            {},
            caravan.RequestError,
            "structured_outputs.regex",
        ),
        (
            SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True)),
            {"schema": {}},
            caravan.RequestError,
            "cannot be combined",
        ),
        (None, {"truncate": 1, "background": True}, TypeError, "unknown options: background, truncate"),
        (SamplingParams(priority=101), {}, InvalidRequestError, "`priority` must be"),
        (None, {"reasoning_effort": "extreme"}, InvalidRequestError, "Invalid enum value 'extreme'"),
    ],
)
def test_what_a_response_cannot_have_is_refused(
    client: Client, params: SamplingParams | None, options: Any, error: type[Exception], message: str
) -> None:
    conversation = client.create_conversation()
    with pytest.raises(error) as refused:
        conversation.respond("x", params, **options)
    assert message in str(refused.value)
    with pytest.raises(error) as refused:
        list(conversation.stream("x", params, **options))
    assert message in str(refused.value)
    assert conversation.items() == []


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(max_tokens=None), "`max_tokens` must be a number here"),
        (SamplingParams(logprobs=2), "`logprobs` must be 0 or None here"),
        (SamplingParams(priority=101), "`priority`"),
        ([SamplingParams()] * 2, "one entry of sampling_params for each of 1. Given: 2"),
    ],
)
def test_a_wrong_request_is_a_request_error_as_in_a_model(client: Client, params: Any, message: str) -> None:
    with pytest.raises(caravan.RequestError) as refused:
        client.generate("p", params)
    assert message in str(refused.value)


def test_an_error_in_a_list_names_its_entry(client: Client) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        client.generate(["p", ""], _GREEDY)
    assert refused.value.__notes__ == ["at entry 1 of 2"]
    assert refused.value.details.param == "prompt"
    assert refused.value.details.status == 400


def test_a_name_that_is_not_there_is_not_found(client: Client) -> None:
    with pytest.raises(NotFoundError, match="There is no conversation with this id"):
        client.conversation("conv_/../x")
    conversation = client.create_conversation()
    for call in (lambda: conversation.item("msg_x"), lambda: conversation.delete_item("msg_x")):
        with pytest.raises(NotFoundError):
            call()
    with pytest.raises(InvalidRequestError):
        conversation.fork("msg_x")
    with pytest.raises(InvalidRequestError):
        conversation.rewind()


def test_a_client_has_a_model_and_calls_may_name_another(served: Served) -> None:
    with Client(served.url + "/v1/", model="toy.gguf") as client:
        assert client.generate("p", _GREEDY, adapter="toy.gguf")[0].finished
        assert client.chat(_HELLO, _GREEDY, use_tqdm=False)[0].finished


@pytest.mark.parametrize("url", ["", "127.0.0.1:3000", "ftp://x", "http://", "http://x:y", "http://x/?q=1"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="the URL of a server is needed"):
        Client(url)


@pytest.mark.parametrize("options", [{"parallel": 0}, {"retries": -1}])
def test_a_wrong_option_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="parallel must be >= 1 and retries >= 0"):
        Client("http://127.0.0.1:1", **options)
    with pytest.raises(TypeError, match="unknown options: retry"):
        Client("http://127.0.0.1:1", retry=1)  # type: ignore[call-arg]


def test_a_closed_client_says_so(served: Served) -> None:
    client = Client(served.url)
    conversation = client.create_conversation()
    client.close()
    client.close()
    for call in (lambda: client.generate("p"), lambda: conversation.items(), lambda: list(client.stream("p"))):
        with pytest.raises(caravan.ClosedError, match="the client is closed"):
            call()


def test_a_client_lasts_as_long_as_its_conversations(served: Served) -> None:
    conversation = Client(served.url).create_conversation([{"role": "user", "content": "a"}])
    gc.collect()
    assert _texts(conversation) == ["a"]
    assert "".join(part.outputs[0].text for part in Client(served.url).stream("a", _GREEDY))


async def test_a_closed_async_client_says_so(served: Served) -> None:
    async with AsyncClient(served.url) as client:
        pass
    with pytest.raises(caravan.ClosedError, match="the client is closed"):
        await client.generate("p")


@pytest.fixture(scope="module")
def slow() -> Iterator[Served]:
    """A server on which 9,000 tokens take longer than any test waits."""
    flags = ("--backend", "fake", "--parallel", "4", "--ctx-size", "40000", "--fake-step-ms", "20")
    with serve(*flags, models=("slow.gguf",)) as server:
        yield server


_ENDLESS = SamplingParams(max_tokens=9000, ignore_eos=True)


def _running(served: Served) -> int:
    with urllib.request.urlopen(f"{served.url}/v1/requests", timeout=DEADLINE_S) as reply:
        return len(json.load(reply)["data"])


async def test_a_cancelled_call_ends_on_the_server(slow: Served) -> None:
    async with AsyncClient(slow.url) as client:
        calls = [
            asyncio.create_task(client.generate(["a", "b"], _ENDLESS)),
            asyncio.create_task(client.chat([{"role": "user", "content": "Hello"}], _ENDLESS)),
        ]
        await eventually(lambda: _running(slow) == 3, "three requests run")
        for call in calls:
            call.cancel()
        assert all(
            isinstance(one, asyncio.CancelledError) for one in await asyncio.gather(*calls, return_exceptions=True)
        )
        await eventually(lambda: _running(slow) == 0, "none runs")


async def test_a_stream_that_is_left_ends_on_the_server(slow: Served) -> None:
    async with AsyncClient(slow.url) as client:
        parts = client.stream("a", _ENDLESS)
        await anext(parts)
        assert _running(slow) == 1
        await parts.aclose()
        await eventually(lambda: _running(slow) == 0, "none runs")
        conversation = await client.create_conversation()
        async for part in conversation.stream("b", SamplingParams(temperature=0, max_tokens=9000)):
            if part.text:
                break
        await eventually(lambda: _running(slow) == 0, "none runs")
        assert await conversation.items() == []


@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_ends_the_call_on_the_server(slow: Served) -> None:
    with Client(slow.url) as client:

        def interrupt() -> None:
            wait_until(lambda: _running(slow), "two requests run", lambda running: running == 2)
            signal.raise_signal(signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            client.generate(["a", "b"], _ENDLESS)
        thread.join()
        wait_until(lambda: _running(slow) == 0, "none runs")
        assert client.generate("after", SamplingParams(max_tokens=1))[0].finished


def test_closing_a_client_ends_what_it_has_under_way(slow: Served) -> None:
    client = Client(slow.url)
    ended: list[Exception] = []

    def work() -> None:
        try:
            client.generate("a", _ENDLESS)
        except caravan.ClosedError as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    asyncio.run(eventually(lambda: _running(slow) == 1, "it runs"))
    client.close()
    thread.join()
    assert [str(error) for error in ended] == ["the client was closed before the call had ended"]
    asyncio.run(eventually(lambda: _running(slow) == 0, "none runs"))


def test_a_timeout_is_kept_by_the_server(slow: Served) -> None:
    params = replace(_ENDLESS, timeout=1.0)
    with Client(slow.url) as client:
        # Whether the first token comes in time depends on the machine.
        with suppress(ServerDeadlineError):
            (output,) = client.generate("a", params)
            assert output.outputs[0].finish_reason == "length"
            assert len(output.outputs[0].token_ids) < 9000
        with pytest.raises(ServerDeadlineError):
            for _ in client.stream("a", params):
                pass
