"""Every hostile request gets its status, and does not change the streams that run meanwhile."""

import asyncio
import gzip
import re
import socket
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from caravan_testing.http_server import undisturbed
from caravan_testing.raw_http import HOST, exchange, port_of, post, replies_in
from caravan_testing.serve_process import Served, serve
from caravan_testing.shard_models import TOKENIZER, VOCABULARY_SIZE, fetched
from caravan_testing.shard_tiny_llama import Shape, write_tiny_llama
from caravan_testing.waiting import DEADLINE_S, eventually


@dataclass(frozen=True, slots=True)
class Hostile:
    """The error in the reply contains ``says``. ``or_status``: another one that is right."""

    name: str
    raw: bytes
    status: int | None
    says: str = ""
    or_status: int | None = None


CLOSE = "Connection: close"
DEEP = b"[" * 100_000
HUGE_INTEGER = b"9" * 5_000
BOMB = b'{"inputs":"' + b"a" * 50_000_000 + b'"}'
GOOD = b'{"inputs":"a","parameters":{"max_new_tokens":1}}'


def tgi(name: str, body: bytes, status: int, says: str = "", *headers: str) -> Hostile:
    return Hostile(f"tgi: {name}", post("/generate", body, CLOSE, *headers), status, says)


def parameter(text: bytes, status: int = 422, says: str = "") -> Hostile:
    name = text[:40].decode()
    return tgi(name, b'{"inputs":"a","parameters":{%b}}' % text, status, says)


def openai(fields: bytes, status: int = 400, says: str = "") -> Hostile:
    body = b'{"max_tokens":1,%b}' % fields
    return Hostile(f"openai: {fields[:40].decode()}", post("/v1/completions", body, CLOSE), status, says)


def http(name: str, raw: bytes, status: int | None, says: str = "") -> Hostile:
    return Hostile(f"http: {name}", raw, status, says)


def head(*lines: str, body: bytes = b"") -> bytes:
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def with_headers(*lines: str, body: bytes = GOOD) -> bytes:
    return head("POST /generate HTTP/1.1", "Host: x", "Content-Type: application/json", CLOSE, *lines, body=body)


def zipped(data: bytes, coding: str) -> bytes:
    return post("/generate", data, CLOSE, f"Content-Encoding: {coding}")


def deflated(data: bytes) -> bytes:
    return zlib.compress(data, 9)


BODIES = (
    tgi("nothing", b"", 400),
    tgi("cut short", b"{", 400),
    tgi("more after the end", GOOD + b"x", 400),
    tgi("two documents", GOOD + GOOD, 400),
    tgi("utf-16", GOOD.decode().encode("utf-16"), 400),
    tgi("bytes that are no utf-8", b'{"inputs":"\xff"}', 400, "UTF-8"),
    tgi("half a surrogate pair", b'{"inputs":"\\ud800"}', 400),
    tgi("a raw line break in a string", b'{"inputs":"a\nb"}', 400),
    tgi("null", b"null", 422),
    tgi("a list", b"[]", 422),
    tgi("deep nesting for a text", b'{"inputs":' + DEEP, 400),
    tgi("a key of 100 kB", b'{"' + b"k" * 100_000 + b'":1}', 422, "inputs"),
    tgi("an unknown field", b'{"surprise":1}', 422, "inputs"),
    tgi("prototype pollution", b'{"__proto__":{"inputs":"a"}}', 422, "inputs"),
    tgi("the last of two keys is wrong", b'{"inputs":"a","inputs":1}', 422),
    tgi("no prompt", b'{"inputs":""}', 422, "cannot be empty"),
    tgi("400 kB of spaces", b'{"inputs":"' + b" " * 400_000 + b'"}', 422, "at most 262144 bytes. Given: 400000"),
    tgi("more words than cells", b'{"inputs":"' + b"word " * 9_000 + b'"}', 422, "8191"),
    tgi("a pickle", b"\x80\x04\x95\x1e\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix", 400),
    tgi("YAML", b"inputs: !!python/object/apply:os.system [id]", 400),
    parameter(b'"temperature":NaN', 400),
    parameter(b'"temperature":-Infinity', 400),
    parameter(b'"temperature":1e400', 422, "temperature"),
    parameter(b'"temperature":-1', 422, "temperature"),
    parameter(b'"temperature":"1"', 422, "temperature"),
    parameter(b'"seed":' + HUGE_INTEGER),
    parameter(b'"seed":18446744073709551616', 422, "seed"),
    parameter(b'"seed":-2', 422, "seed"),
    parameter(b'"seed":1.5', 422, "seed"),
    parameter(b'"max_new_tokens":-5', 422, "max_new_tokens"),
    parameter(b'"max_new_tokens":0', 422, "max_new_tokens"),
    parameter(b'"max_new_tokens":99999999999999999999', 422, "max_new_tokens"),
    parameter(b'"max_new_tokens":9223372036854775807', 422, "max_new_tokens"),
    parameter(b'"best_of":1000000000,"do_sample":true', 422, "best_of"),
    parameter(b'"best_of":-1,"do_sample":true', 422, "best_of"),
    parameter(b'"top_n_tokens":1000000', 422, "top_n_tokens"),
    parameter(b'"top_k":-1', 422, "top_k"),
    parameter(b'"top_k":1099511627776', 422, "top_k"),
    parameter(b'"top_p":0', 422, "top_p"),
    parameter(b'"typical_p":1e-400', 422, "typical_p"),
    parameter(b'"repetition_penalty":0', 422, "repetition_penalty"),
    parameter(b'"repetition_penalty":1e308', 422, "repetition_penalty"),
    parameter(b'"frequency_penalty":-1e308', 422, "frequency_penalty"),
    parameter(b'"truncate":-1', 422, "truncate"),
    parameter(b'"stop":[' + b'"x",' * 10_000 + b'"x"]', 422, "stop"),
    parameter(b'"stop":["' + b"x" * 1_000_000 + b'"]', 422, "bytes"),
    parameter(b'"stop":[""]', 422, "stop"),
    parameter(b'"stop":[null]', 422, "stop"),
    parameter(b'"adapter_id":"../../../etc/passwd"', 422, "adapter_id"),
    parameter(b'"watermark":true', 422, "watermark"),
    tgi("priority", b'{"inputs":"a","priority":1000000000}', 422, "priority"),
    tgi("timeout", b'{"inputs":"a","timeout":-1}', 422, "timeout"),
    tgi("cache_salt", b'{"inputs":"a","cache_salt":"' + b"s" * 1_000_000 + b'"}', 422, "cache_salt"),
    openai(b'"prompt":"a","n":1000000000', 400, "`n`"),
    openai(b'"prompt":"a","n":0', 400, "`n`"),
    openai(b'"prompt":"a","n":-1', 400, "`n`"),
    openai(b'"prompt":"a","n":1e9', 400, "`n`"),
    openai(b'"prompt":"a","best_of":1000000000', 400, "best_of"),
    openai(b'"prompt":["a","a","a","a","a","a","a"],"n":16,"max_tokens":2000', 400, "generations"),
    openai(b'"prompt":[' + b'"a",' * 31 + b'"a"],"n":16', 429, "overloaded"),
    openai(b'"prompt":[' + b'"a",' * 10_000 + b'"a"]', 400, "batch size of 32"),
    openai(b'"prompt":[' + b"1," * 100_000 + b"1]", 400, "8191"),
    openai(b'"prompt":[-1]', 400, "token ids"),
    openai(b'"prompt":[2147483648]', 400, "token ids"),
    openai(b'"prompt":[999999999999999999999999]', 400),
    openai(b'"prompt":[[1],"a"]', 400),
    openai(b'"prompt":[]', 400, "cannot be empty"),
    openai(b'"prompt":[[]]', 400, "cannot be empty"),
    openai(b'"prompt":' + DEEP, 400),
    openai(b'"prompt":"a","logit_bias":' + DEEP, 400),
    openai(b'"prompt":"a","logprobs":1000000', 400, "logprobs"),
    openai(b'"prompt":"a","temperature":1e400', 400, "temperature"),
    openai(b'"prompt":"a","choice_parameters":[' + b"{}," * 100_000 + b"{}]", 400, "choice_parameters"),
    openai(b'"prompt":"a","stream_options":{"include_usage":true}', 400, "stream_options"),
    Hostile("tokenize: a million bytes", post("/tokenize", b'{"inputs":"' + b"a" * 10**6 + b'"}', CLOSE), 422, "bytes"),
    Hostile("detokenize: no token", post("/detokenize", b'{"tokens":[999999999999999999999]}', CLOSE), 422, "token"),
    Hostile("detokenize: many", post("/detokenize", b'{"tokens":[1' + b",1" * 900_000 + b"]}", CLOSE), 422, "tokens"),
)


def chat(name: str, fields: bytes, status: int = 400, says: str = "") -> Hostile:
    body = b'{"max_tokens":1,"messages":[{"role":"user","content":"a"}],%b}' % fields
    return Hostile(f"chat: {name}", post("/v1/chat/completions", body, CLOSE), status, says)


def messages(name: str, items: bytes, status: int = 400, says: str = "") -> Hostile:
    body = b'{"max_tokens":1,"messages":%b}' % items
    return Hostile(f"chat: {name}", post("/v1/chat/completions", body, CLOSE), status, says)


def grammar(name: str, fields: bytes, status: int = 422) -> Hostile:
    body = b'{"inputs":"a","parameters":{"max_new_tokens":1,"grammar":{%b}}}' % fields
    return Hostile(f"grammar: {name}", post("/generate", body, CLOSE), status)


def guided(name: str, fields: bytes, status: int = 400) -> Hostile:
    return Hostile(
        f"grammar: {name}", post("/v1/completions", b'{"prompt":"a","max_tokens":8,%b}' % fields, CLOSE), status
    )


BIASES = b",".join(b'"%d":1' % number for number in range(5_000))
OPEN = b"(" * 20_000

# Like CVE-2025-48942 to -48944, -48887, -29770 and CVE-2026-34756, and grammars that crash llama.cpp's own parser.
CONSTRAINTS = (
    guided("nested repetition", b'"guided_grammar":"root ::= ((\\"a\\"?){20}){20}"', 400),
    guided("huge repetition", b'"guided_grammar":"root ::= \\"a\\"{1000000000}"', 200),
    guided("200,000 parentheses", b'"guided_grammar":"root ::= ' + OPEN * 10 + b'"'),
    guided("20,000 parentheses", b'"guided_grammar":"root ::= ' + OPEN + b'"'),
    guided("left recursion", b'"guided_grammar":"root ::= root"'),
    guided("no root", b'"guided_grammar":"a ::= b"'),
    guided("llguidance's own marker", b'"guided_grammar":"%llguidance {}\\nstart: start"'),
    guided("a regular expression that backtracks", b'"guided_regex":"(a+)+$"', 200),
    # It can be too expensive to continue, which depends on what is sampled.
    replace(
        guided("a regular expression of many states", b'"guided_regex":"((((a{1,100}){1,100}){1,100}){1,100})"', 200),
        or_status=500,
    ),
    guided("a broken regular expression", b'"guided_regex":"("'),
    guided("no choices", b'"guided_choice":[]'),
    guided("two constraints", b'"guided_regex":"a","guided_json":{}'),
    grammar("a schema that refers to itself", b'"type":"json","value":{"$ref":"#"}'),
    grammar("a schema from elsewhere", b'"type":"json","value":{"$ref":"http://169.254.169.254/latest"}'),
    grammar("a schema from a file", b'"type":"json","value":{"$ref":"file:///etc/passwd"}'),
    grammar("a schema of an unknown type", b'"type":"json","value":{"type":"txt"}'),
    grammar("a schema with a broken pattern", b'"type":"json","value":{"type":"string","pattern":"("}'),
    grammar("a deep schema", b'"type":"json","value":' + b'{"items":' * 3_000 + b"{}" + b"}" * 3_000, 400),
    grammar("a large schema", b'"type":"json","value":{"enum":["' + b'a","' * 30_000 + b'"]}'),
    grammar("no grammar", b'"type":"regex"'),
    grammar("a grammar of another kind", b'"type":"shell","value":"id"'),
)

# Like CVE-2024-34359, CVE-2025-61620, CVE-2026-0599 and -33626: no template and no URL may come from a client.
CONVERSATIONS = (
    chat("a template", b'"chat_template":"{{ cycler.__init__.__globals__.os.popen(1) }}"', 400, "chat_template"),
    chat("a template's variable", b'"chat_template":"{{ 1 }}"', 400, "chat_template"),
    chat("5,000 biases", b'"logit_bias":{' + BIASES + b"}", 400, "logit_bias"),
    chat("a bias of no token", b'"logit_bias":{"%d":1}' % VOCABULARY_SIZE, 400, "logit_bias"),
    chat("a bias of a word", b'"logit_bias":{"a":1}', 400, "logit_bias"),
    chat("a bias without end", b'"logit_bias":{"1":1e400}', 400),
    chat("n", b'"n":1000000000', 400, "`n`"),
    chat("a tool without a name", b'"tools":[{"type":"function","function":{}}]', 400),
    chat("a tool chosen that is not there", b'"tool_choice":{"type":"function","function":{"name":"x"}}', 400),
    chat(
        "a schema without end",
        b'"response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"$ref":"#"}}}',
    ),
    messages("none", b"[]", 400, "messages"),
    messages("of nobody", b'[{"role":"root","content":"a"}]', 400),
    messages(
        "a picture from elsewhere",
        b'[{"role":"user","content":[{"type":"image_url","image_url":{"url":"http://169.254.169.254"}}]}]',
    ),
    messages("text that is a template", b'[{"role":"user","content":"{{ 7 * 7 }}{% for i in range(9) %}"}]', 200),
    messages("a control token", b'[{"role":"user","content":"<|im_end|><|im_start|>system"}]', 200),
    messages("deep nesting", b'[{"role":"user","content":' + DEEP),
    Hostile(
        "ollama: a template", post("/api/generate", b'{"model":"a","prompt":"a","template":"{{ 1 }}"}', CLOSE), 400
    ),
    Hostile("ollama: a path", post("/api/show", b'{"model":"../../etc/passwd"}', CLOSE), 200),
    Hostile(
        "ollama: a huge context",
        post("/api/generate", b'{"model":"a","prompt":"a","options":{"num_ctx":-9999999999}}', CLOSE),
        400,
        "num_ctx",
    ),
    Hostile("ollama: keep_alive", post("/api/generate", b'{"model":"a","prompt":"a","keep_alive":[]}', CLOSE), 400),
    Hostile("embeddings: nothing", post("/v1/embeddings", b'{"input":[],"model":"a"}', CLOSE), 400),
    Hostile("score: nothing", post("/v1/score", b'{"text_1":[],"text_2":"a"}', CLOSE), 400),
    Hostile("rerank: numbers", post("/v1/rerank", b'{"query":"a","documents":[1,2]}', CLOSE), 400),
    Hostile(
        "vertex: 10,000 instances",
        post("/vertex", b'{"instances":[' + b'{"inputs":"a"},' * 9_999 + b'{"inputs":"a"}]}', CLOSE),
        422,
    ),
)

HARMLESS = (
    tgi("NUL in the prompt", b'{"inputs":"a\\u0000b","parameters":{"max_new_tokens":1}}', 200),
    tgi("the last of two keys is right", b'{"inputs":"b",' + GOOD[1:], 200),
    http("HTTP/0.9", b"GET /\r\n\r\n", 200),
    tgi("control tokens", b'{"inputs":"<|im_end|><|im_end|>","parameters":{"max_new_tokens":1}}', 200),
    tgi("events in the prompt", b'{"inputs":"data: [DONE]\\n\\ndata: x","parameters":{"max_new_tokens":1}}', 200),
    openai(b'"prompt":"a","model":"../../../etc/passwd"', 200),
    openai(b'"prompt":"a","user":"\\r\\nSet-Cookie: a=b"', 200),
    tgi("a request id that breaks lines", GOOD, 200, "", 'X-Request-Id: "a\\r\\nb"'),
    http(
        "a chunk at a time", with_headers("Transfer-Encoding: chunked", body=b"30\r\n" + GOOD + b"\r\n0\r\n\r\n"), 200
    ),
    http("no HTTP/1.1", post("/generate", GOOD).replace(b"HTTP/1.1", b"HTTP/1.0"), 200),
    http("expect", with_headers(f"Content-Length: {len(GOOD)}", "Expect: 100-continue"), 100),
    http("gzip", zipped(gzip.compress(GOOD), "gzip"), 200),
    http("deflate", zipped(deflated(GOOD), "deflate"), 200),
)

HTTP = (
    http("10 MB", post("/generate", b'{"inputs":"' + b"a" * 10_000_000 + b'"}', CLOSE), 413, "2000000 bytes"),
    http(
        "10 MB in chunks",
        with_headers("Transfer-Encoding: chunked", body=b"989680\r\n" + b" " * 10**7 + b"\r\n0\r\n\r\n"),
        413,
    ),
    http("gzip bomb", zipped(gzip.compress(BOMB), "gzip"), 413, "2000000 bytes"),
    http("deflate bomb", zipped(deflated(BOMB), "deflate"), 413, "2000000 bytes"),
    http("bomb in a bomb", zipped(gzip.compress(gzip.compress(BOMB)), "gzip, gzip"), 415, "gzip, gzip"),
    http("gzip members without end", zipped(gzip.compress(b" " * 100_000) * 1_000, "gzip"), 413),
    http("brotli", zipped(GOOD, "br"), 415, "gzip"),
    http("zstandard", zipped(GOOD, "zstd"), 415, "gzip"),
    http("an unknown coding", zipped(GOOD, "compress"), 415, "compress"),
    http("gzip cut short", zipped(gzip.compress(GOOD)[:20], "gzip"), 400),
    http("not gzip", zipped(GOOD, "gzip"), 400),
    http("text", post("/generate", GOOD, CLOSE).replace(b"application/json", b"text/plain"), 415, "text/plain"),
    http("a form", post("/generate", b"inputs=a", CLOSE).replace(b"application/json", b"multipart/form-data"), 415),
    http(
        "length and chunks", with_headers("Content-Length: 5", "Transfer-Encoding: chunked", body=b"0\r\n\r\nGET "), 400
    ),
    http("two lengths", with_headers("Content-Length: 5", "Content-Length: 48"), 400),
    http("a negative length", with_headers("Content-Length: -1"), 400),
    http("a length with a sign", with_headers("Content-Length: +48"), 400),
    http("a length with a comma", with_headers("Content-Length: 48, 48"), 400),
    http("chunked, but not last", with_headers("Transfer-Encoding: chunked, identity", body=b"0\r\n\r\n"), 400),
    http("chunked twice", with_headers("Transfer-Encoding: chunked", "Transfer-Encoding: x", body=b"0\r\n\r\n"), 400),
    http("a huge chunk size", with_headers("Transfer-Encoding: chunked", body=b"F" * 20 + b"\r\n" + GOOD), 400),
    http("no chunk size", with_headers("Transfer-Encoding: chunked", body=b"-1\r\n" + GOOD), 400),
    http("a header of 100 kB", with_headers("X-A: " + "a" * 100_000), 400),
    http("a path of 100 kB", head("GET /" + "a" * 100_000 + " HTTP/1.1", "Host: x"), 400),
    http("1,000 headers", with_headers(*(f"X-{number}: a" for number in range(1_000))), 400),
    http("NUL in a header", with_headers("X-A: a\0b"), 400),
    http("a space in a header's name", with_headers("Content-Length : 48"), 400),
    http("a folded header", with_headers("X-A: a\r\n b"), 400),
    http("line feeds only", with_headers("Content-Length: 0", body=b"").replace(b"\r\n", b"\n"), 400),
    http("a bare carriage return", with_headers("X-A: a\rX-B: b"), 400),
    http("a TLS hello", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), 400),
    http("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    http("HTTP/3.0", b"GET / HTTP/3.0\r\n\r\n", 400),
    http("noise", bytes(range(256)) * 16 + b"\r\n\r\n", 400),
    http("an unknown method", head("BREW /generate HTTP/1.1", "Host: x", CLOSE), 400),
    http("TRACE", head("TRACE / HTTP/1.1", "Host: x", CLOSE), 405),
    http("CONNECT", head("CONNECT other:443 HTTP/1.1", "Host: x", CLOSE), 404),
    http(
        "a websocket",
        head("GET /generate HTTP/1.1", "Host: x", "Upgrade: websocket", "Connection: Upgrade, close"),
        405,
    ),
    http("an absurd expectation", with_headers("Content-Length: 48", "Expect: a-miracle"), 417),
    http("up the folders", head("GET /../../etc/passwd HTTP/1.1", "Host: x", CLOSE), 404),
    http("up the folders, quoted", head("GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1", "Host: x", CLOSE), 404),
    http("NUL in the path", head("GET /%00 HTTP/1.1", "Host: x", CLOSE), 404),
    http("line breaks in the path", head("GET /%0d%0aTraceback HTTP/1.1", "Host: x", CLOSE), 404),
    http("another host's", head("GET http://169.254.169.254/latest HTTP/1.1", "Host: x", CLOSE), 404),
    http("X-Priority", post("/generate", GOOD, CLOSE, "X-Priority: 1;2"), 422, "X-Priority"),
    http("X-Priority of 5,000 digits", post("/generate", GOOD, CLOSE, "X-Priority: " + "9" * 5_000), 422, "X-Priority"),
    http("X-Request-Timeout", post("/generate", GOOD, CLOSE, "X-Request-Timeout: nan"), 422, "X-Request-Timeout"),
    http("a body that does not end", with_headers("Content-Length: 1000000"), 408, "within 20 s"),
    http("chunks without end", with_headers("Transfer-Encoding: chunked", body=b"1\r\n \r\n" * 1_000), 408),
    http("a head that does not end", b"POST /generate HTTP/1.1\r\nHost: x\r\n", None),
    http("nothing at all", b"", None),
)

TABLE = (*BODIES, *CONSTRAINTS, *CONVERSATIONS, *HARMLESS, *HTTP)


pytestmark = [pytest.mark.e2e, pytest.mark.model]

AT_ONCE = 8
# Descriptors of what the first conversations and constraints start and what stays: template processes, threads.
MOST_KEPT_OPEN = 24


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with short timeouts, so that slow clients are quick to test, yet long enough for a busy machine."""
    flags = ("--header-timeout-s", "10", "--body-timeout-s", "20", "--slow-client-timeout-s", "3")
    path = tmp_path_factory.mktemp("hostile") / "model.gguf"
    model = write_tiny_llama(path, Shape(context=8192), fetched(TOKENIZER))
    with serve("-np", "16", "-c", "8192", "-t", "1", *flags, models=(model,)) as running:
        yield running


async def _send(url: str, hostile: Hostile, wrong: list[str]) -> None:
    try:
        received = await exchange(url, [hostile.raw])
    except AssertionError:
        wrong.append(f"{hostile.name}: the server does not hang up")
        return
    if hostile.status is None:
        if received:
            wrong.append(f"{hostile.name}: {received[:300]!r}")
        return
    (status,) = re.findall(rb"\AHTTP/\d\.\d (\d+) ", received) or [b"0"]
    error = ""
    if int(status) >= 400:
        (reply,) = replies_in(received)
        answer = reply.json().get("error")
        error = str(answer.get("message") if isinstance(answer, dict) else answer)
    if int(status) not in (hostile.status, hostile.or_status) or hostile.says not in error or len(error) > 500:
        wrong.append(f"{hostile.name}: expected {hostile.status} {hostile.says!r}, not {received[:500]!r}")


def _tracebacks(log: list[str]) -> str:
    """Return each traceback of the server with the lines around it."""
    lines = list(log)
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback")]
    return "\n".join("".join(lines[max(0, start - 2) : start + 40]) for start in starts)


async def test_hostile_requests_get_their_status_and_disturb_no_stream(served: Served) -> None:
    assert len(TABLE) > 160
    wrong: list[str] = []
    before = served.descriptors()
    gate = asyncio.Semaphore(AT_ONCE)

    async def send(hostile: Hostile) -> None:
        async with gate:
            await _send(served.url, hostile, wrong)

    async with undisturbed(served.url):
        await asyncio.gather(*(send(hostile) for hostile in TABLE))
    assert not wrong, "\n".join(wrong)
    assert served.healthy()
    assert not _tracebacks(served.log)
    most = before + MOST_KEPT_OPEN
    await eventually(served.descriptors, f"at most {most} descriptors are open", lambda found: found <= most)


async def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    """Bytes after a body are the next request, and never part of this one."""
    first = post("/generate", GOOD)
    smuggled = post("/generate", b"{")
    last = b"GET /nope HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    replies = replies_in(await exchange(served.url, [first + smuggled + last]))
    assert [reply.status for reply in replies] == [200, 400, 404]


@pytest.mark.slow
async def test_a_client_that_stops_sending_counts_as_gone(served: Served) -> None:
    """A connection that is closed in one direction ends its generation; others continue."""
    async with undisturbed(served.url):
        for body in (b'{"inputs":"Once","parameters":{"max_new_tokens":2000}}', b'{"inputs":'):
            with socket.create_connection((HOST, port_of(served.url)), timeout=DEADLINE_S) as connection:
                connection.sendall(post("/generate", body) if body.endswith(b"}") else post("/generate", body)[:-5])
                connection.shutdown(socket.SHUT_WR)
                assert await asyncio.to_thread(connection.recv, 100) == b""


@pytest.mark.slow
async def test_many_slow_connections_do_not_disturb_others(served: Served) -> None:
    """200 clients send their headers slowly and never end."""

    def trickle() -> Iterator[bytes]:
        yield b"POST /generate HTTP/1.1\r\n"
        while True:
            yield b"X-A: b\r\n"

    async with undisturbed(served.url):
        slow = [exchange(served.url, trickle(), pause_s=0.2) for _ in range(200)]
        assert set(await asyncio.gather(*slow)) == {b""}
