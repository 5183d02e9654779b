"""What the benchmark sends, and how it reads replies."""

from itertools import combinations, pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caravan_serve.bench.client_sse import SseParser
from caravan_serve.bench.dialects import CompletionsDialect, GenerateDialect
from caravan_serve.bench.request import Asked, BenchRequest, DrawnTokens, StreamRecord
from caravan_serve.bench.runner import poisson_arrivals
from caravan_serve.bench.workloads import Shape, Workload, phases, stall_plan, warm_up

PHASED = [workload for workload in Workload if workload not in (Workload.STALL, Workload.AGENTS)]
STREAM = 'data: {"text":"caf\u00e9"}\n\n: keep-alive\n\nevent: x\ndata:{"b":2}\r\n\r\ndata: [DONE]\n\n'.encode()
EVENTS = ['{"text":"caf\u00e9"}'.encode(), b'{"b":2}', b"[DONE]"]


@pytest.mark.parametrize("workload", PHASED)
def test_the_same_seed_gives_the_same_prompts(workload: Workload) -> None:
    assert phases(workload, Shape(seed=3)) == phases(workload, Shape(seed=3))
    assert phases(workload, Shape(seed=3)) != phases(workload, Shape(seed=4))


def test_prompts_of_the_plain_workload_share_no_prefix() -> None:
    (phase,) = phases(Workload.PLAIN, Shape())
    assert len(phase.requests) == 64
    for one, other in combinations(phase.requests, 2):
        assert one.prompt.split()[:4] != other.prompt.split()[:4]


def test_prompts_have_the_requested_sizes() -> None:
    (phase,) = phases(Workload.PLAIN, Shape(words=5, tokens=3, requests=2))
    assert [(len(request.prompt.split()), request.max_tokens) for request in phase.requests] == [(5, 3), (5, 3)]


def test_prompts_of_the_shared_prefix_workload_differ_only_in_their_tails() -> None:
    cold, warm = phases(Workload.SHARED_PREFIX, Shape(concurrency=8))
    prompts = [request.prompt.split() for request in (*cold.requests, *warm.requests)]
    assert (cold.name, warm.name, len(prompts)) == ("cold", "warm", 16)
    assert len({tuple(prompt[:600]) for prompt in prompts}) == 1
    assert len({tuple(prompt[600:]) for prompt in prompts}) == 16


def test_a_returning_prefix_comes_once_before_the_other_prompts_and_once_after_them() -> None:
    cold, between, warm = phases(Workload.RETURNING_PREFIX, Shape(requests=2, between=7))
    assert (cold.concurrency, between.concurrency, warm.concurrency) == (1, None, 1)
    assert len(between.requests) == 7
    for first, again in zip(cold.requests, warm.requests, strict=True):
        assert first.prompt.split()[:600] == again.prompt.split()[:600]
        assert first.prompt != again.prompt
    assert cold.requests[0].prompt.split()[:4] != cold.requests[1].prompt.split()[:4]


def test_the_n_workload_asks_for_n_choices() -> None:
    (phase,) = phases(Workload.N, Shape(n=5))
    assert {request.n for request in phase.requests} == {5}


def test_stall_streams_are_longer_than_the_long_prompts_output() -> None:
    plan = stall_plan(Shape())
    assert len(plan.streams) == 4
    assert len(plan.intruder.prompt.split()) == 1500
    assert min(stream.max_tokens for stream in plan.streams) > plan.intruder.max_tokens


def test_warm_up_prompts_are_not_measured_prompts() -> None:
    (phase,) = phases(Workload.PLAIN, Shape())
    warm = warm_up(Shape(), 2)
    assert not {request.prompt for request in warm} & {request.prompt for request in phase.requests}


def test_poisson_arrivals_have_the_requested_rate() -> None:
    arrivals = poisson_arrivals(4000, rate=2.5, seed=1)
    assert arrivals == poisson_arrivals(4000, rate=2.5, seed=1)
    assert arrivals != poisson_arrivals(4000, rate=2.5, seed=2)
    assert list(arrivals) == sorted(arrivals)
    assert 4000 / arrivals[-1] == pytest.approx(2.5, rel=0.05)


def test_the_completions_body_demands_an_exact_length() -> None:
    body = msgspec.json.decode(CompletionsDialect(model="m").body(BenchRequest(prompt="hi", max_tokens=7, n=3)))
    assert body["max_tokens"] == 7
    assert body["n"] == 3
    assert body["ignore_eos"] is True
    assert body["temperature"] == 0
    assert body["stream_options"] == {"include_usage": True}


def test_both_bodies_can_ask_for_drawn_tokens() -> None:
    drawn = DrawnTokens(temperature=0.8, top_k=40)
    request = BenchRequest(prompt="hi", max_tokens=7)
    body = msgspec.json.decode(CompletionsDialect(model="m", asked=Asked(drawn=drawn)).body(request))
    assert (body["temperature"], body["top_k"], "top_p" in body) == (0.8, 40, False)
    parameters = msgspec.json.decode(GenerateDialect(drawn=drawn).body(request))["parameters"]
    assert (parameters["do_sample"], parameters["temperature"], parameters["top_k"]) == (True, 0.8, 40)


def test_completions_events_give_token_times_and_usage() -> None:
    dialect = CompletionsDialect(model="m")
    record = StreamRecord()
    dialect.read(b'{"choices":[{"text":"a","index":0,"finish_reason":null}]}', 1.0, record)
    dialect.read(b'{"choices":[{"text":"b","index":1,"finish_reason":null}]}', 2.0, record)
    # llama-server ends a choice with an event without text, which is not a token.
    dialect.read(b'{"choices":[{"text":"","index":0,"finish_reason":"length"}]}', 3.0, record)
    dialect.read(b'{"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}', 4.0, record)
    assert not record.ended
    dialect.read(b"[DONE]", 5.0, record)
    assert record == StreamRecord(
        token_times={0: [1.0], 1: [2.0]}, prompt_tokens=5, usage_tokens=2, error=None, ended=True
    )


def test_an_error_event_of_completions_is_read() -> None:
    record = StreamRecord()
    CompletionsDialect(model="m").read(b'{"error":{"message":"full","http_status_code":422}}', 1.0, record)
    assert record.error == "full"


def test_generate_events_give_token_times_and_details() -> None:
    dialect = GenerateDialect()
    record = StreamRecord()
    dialect.read(b'{"index":1,"token":{"id":4,"text":" T"},"generated_text":null,"details":null}', 1.0, record)
    last = b'{"index":2,"token":{"id":5},"details":{"finish_reason":"length","generated_tokens":2,"input_length":4}}'
    dialect.read(last, 2.0, record)
    assert record == StreamRecord(token_times={0: [1.0, 2.0]}, prompt_tokens=4, usage_tokens=2, ended=True)


def test_an_error_event_of_generate_is_read() -> None:
    record = StreamRecord()
    GenerateDialect().read(b'{"error":"Model is overloaded","error_type":"overloaded"}', 1.0, record)
    assert record.error == "Model is overloaded"


def test_an_unreadable_event_raises() -> None:
    with pytest.raises(msgspec.MsgspecError):
        GenerateDialect().read(b"{", 1.0, StreamRecord())


def test_a_whole_completion_is_one_event() -> None:
    asked = Asked(drawn=DrawnTokens(temperature=1.0, min_p=0.05), whole=True, logprobs=5, schema='{"type": "array"}')
    dialect = CompletionsDialect(model="m", asked=asked)
    body = msgspec.json.decode(dialect.body(BenchRequest(prompt="hi", max_tokens=7)))
    assert not body.keys() & {"stream", "stream_options"}
    assert (body["min_p"], body["logprobs"], body["json_schema"]) == (0.05, 5, {"type": "array"})
    record = StreamRecord()
    reply = b'{"choices":[{"text":"a b c","index":0}],"usage":{"prompt_tokens":5,"completion_tokens":7}}'
    dialect.read(reply, 1.0, record)
    assert (record.ended, record.prompt_tokens, record.usage_tokens) == (True, 5, 7)


def test_a_whole_stream_gives_all_events() -> None:
    assert SseParser().feed(STREAM) == EVENTS


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split_gives_the_same_events(cuts: list[int]) -> None:
    parser = SseParser()
    borders = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[begin:end] for begin, end in pairwise(borders)]
    assert [data for piece in pieces for data in parser.feed(piece)] == EVENTS


def test_an_unfinished_line_is_not_an_event() -> None:
    parser = SseParser()
    assert parser.feed(b'data: {"a"') == []
    assert parser.feed(b":1}\n") == [b'{"a":1}']
