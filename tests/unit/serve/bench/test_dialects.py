"""The bodies that each dialect sends and the events that it reads."""

import msgspec
import pytest

from caravan_serve.bench.dialects import CompletionsDialect, GenerateDialect
from caravan_serve.bench.request import Asked, BenchRequest, DrawnTokens, StreamRecord


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
