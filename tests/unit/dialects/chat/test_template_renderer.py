"""Templates are rendered as transformers renders them, and a bad template harms no other request."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest

from caravan_dialects import guarded_process
from caravan_dialects.chat.template_messages import TemplateError, TemplateOutputError
from caravan_dialects.chat.template_renderer import MAX_SOURCE_BYTES, TemplateRenderer
from caravan_scheduler.core.errors import HelperError
from caravan_testing.closing import Closing
from caravan_testing.waiting import deliver

# For templates that would never end: they use up so much processor time.
TIME_LIMIT_S = 0.5
# For templates that end of themselves, also on a busy machine.
LONG_TIME_LIMIT_S = 60.0


@pytest.fixture
def renderer(closing: Closing) -> TemplateRenderer:
    return closing(TemplateRenderer(LONG_TIME_LIMIT_S))


async def test_templates_get_the_functions_and_filters_of_transformers(renderer: TemplateRenderer) -> None:
    cases: list[tuple[str, dict[str, Any], str]] = [
        (
            "{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}",
            {"messages": [{"role": "user", "content": "hi"}, {"role": "x", "content": "no"}]},
            "hi\n",
        ),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", {}, '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", {}, "[\n  1\n]"),
        (
            "{% for i in (0, 1, 2) %}{% if not i %}{% continue %}{% endif %}1{% break %}{% endfor %}",
            {},
            "1",
        ),
        ("a{% generation %}b{{ x }}{% endgeneration %}c", {"x": 1}, "ab1c"),
        ("{{ missing }}{{ x.missing }}", {"x": {}}, ""),
        ("{{ none_given is none }}", {"none_given": None}, "True"),
        ("{% set ns = namespace(n=0) %}{% set ns.n = 3 %}{{ ns.n }}", {}, "3"),
        ("{{ strftime_now('%Y') | int > 2000 }}", {}, "True"),
        ("🙂{{ x }}", {"x": "🙂"}, "🙂🙂"),
        # Those of llama.cpp.
        ("{{ date_string | length }} {{ datetime | length }}", {}, "11 11"),
        ("{{ date_string }}", {"date_string": "today"}, "today"),
        ("{{ 'a' + functions }}", {"tools": None}, "a"),
        ("{{ functions }}", {"tools": [{"name": "é"}]}, '[\n  {\n    "name": "é"\n  }\n]'),
    ]
    for source, variables, expected in cases:
        assert await renderer.render(source, variables, 1000) == expected, source


HOSTILE = [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{% for %}", "Expected"),
    ("{{ 1 / 0 }}", "division by zero"),
    ("{{ 'a' + none }}", "can only concatenate str"),
    # Attempts to leave the sandbox.
    ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{{ ''.__class__.__base__.__subclasses__() }}", "unsafe"),
    ("{{ self.__init__.__globals__ }}", "unsafe"),
    ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
    ("{{ strftime_now.__globals__.json }}", "unsafe"),
    ("{{ '{0.__class__.mro}'.format(1) }}", "unsafe"),
    ("{{ ('%s' | attr('__class__')).mro }}", "unsafe"),
    ("{{ messages.append(1) }}", "unsafe"),
    ("{{ messages.clear() }}", "unsafe"),
    ("{% include '/etc/passwd' %}", "loader"),
    ("{% import 'os' as os %}", "loader"),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nested too deeply"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", ""),
    ("{{ range(10**9) | list | length }}", "Range too big"),
    # Memory.
    ("{{ 'x' * 10**9 }}", "memory"),
    ("{{ [0] * 10**9 }}", "memory"),
    ("{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}", "memory"),
    # Output.
    ("{% for i in range(99999) %}0123456789{% endfor %}", "more than 1000 bytes"),
    ("{{ 'x' * 10**7 }}", "more than 1000 bytes"),
]


async def test_a_bad_template_is_an_error_that_names_its_problem_and_the_next_is_served(
    renderer: TemplateRenderer,
) -> None:
    for source, problem in HOSTILE:
        with pytest.raises(TemplateError) as caught:
            await renderer.render(source, {"messages": []}, 1000)
        assert problem in str(caught.value), source
        assert len(str(caught.value)) < 600
        assert await renderer.render("{{ 1 + 1 }}", {}, 10) == "2"


async def test_a_template_without_end_is_ended_and_the_next_is_served(closing: Closing) -> None:
    renderer = closing(TemplateRenderer(TIME_LIMIT_S, LONG_TIME_LIMIT_S))
    for source in (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
    ):
        async with asyncio.timeout(LONG_TIME_LIMIT_S):
            with pytest.raises(TemplateError, match=f"did not end within {TIME_LIMIT_S:g} s"):
                await renderer.render(source, {"messages": []}, 1000)
        assert await renderer.render("{{ 1 + 1 }}", {}, 10) == "2"


async def test_a_process_that_is_stopped_or_killed_loses_no_request(closing: Closing) -> None:
    renderer = closing(TemplateRenderer(TIME_LIMIT_S, grace_s=0.5))
    await renderer.render("start", {}, 10)
    for number in (signal.SIGSTOP, signal.SIGKILL, signal.SIGTERM):
        (pid,) = renderer.processes.idle_pids
        await deliver(pid, number)
        assert await renderer.render("{{ 1 + 1 }}", {}, 10) == "2"
        assert pid not in renderer.processes.idle_pids


@pytest.fixture(params=[signal.SIGKILL, signal.SIGSTOP])
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Processes load a library in place of jinja2 that ends or stops as if another process did that."""
    (tmp_path / "jinja2.py").write_text(f"import os; os.kill(os.getpid(), {request.param:d})")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("ended")
async def test_a_template_is_not_blamed_for_two_processes_that_others_end(
    monkeypatch: pytest.MonkeyPatch, closing: Closing
) -> None:
    # Time for its start is part of what a process may take.
    monkeypatch.setattr(guarded_process, "_START_S", 1.0)
    renderer = closing(TemplateRenderer(TIME_LIMIT_S, grace_s=0.1))
    with pytest.raises(HelperError, match="cannot be rendered at present"):
        await renderer.render("x", {}, 10)
    monkeypatch.undo()
    assert await renderer.render("x", {}, 10) == "x"


async def test_a_process_that_cannot_be_started_is_not_blamed_on_the_template(
    monkeypatch: pytest.MonkeyPatch, renderer: TemplateRenderer
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(HelperError, match="could not be started"):
        await renderer.render("x", {}, 10)
    monkeypatch.undo()
    assert await renderer.render("x", {}, 10) == "x"


async def test_the_source_has_a_size_limit(renderer: TemplateRenderer) -> None:
    with pytest.raises(TemplateError, match=f"at most {MAX_SOURCE_BYTES} bytes"):
        await renderer.render("x" * (MAX_SOURCE_BYTES + 1), {}, 10)


async def test_the_output_limit_counts_bytes(renderer: TemplateRenderer) -> None:
    assert await renderer.render("éé", {}, 4) == "éé"
    with pytest.raises(TemplateOutputError) as caught:
        await renderer.render("ééé", {}, 4)
    assert (caught.value.limit_bytes, caught.value.given_bytes) == (4, 6)


async def test_a_slow_template_does_not_delay_others(renderer: TemplateRenderer) -> None:
    # Start both processes.
    await asyncio.gather(*(renderer.render("warm", {}, 10) for _ in range(2)))
    slow = asyncio.create_task(renderer.render("{{ 9 ** (9 ** 9) }}", {}, 10))
    await asyncio.sleep(0.05)
    assert await renderer.render("fast", {}, 10) == "fast"
    assert not slow.done()
    slow.cancel()
    await asyncio.wait([slow])


async def test_a_client_that_leaves_ends_only_its_own_process(renderer: TemplateRenderer) -> None:
    leaving = asyncio.create_task(renderer.render("{{ 9 ** (9 ** 9) }}", {}, 10))
    await asyncio.sleep(0.2)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert await renderer.render("next", {}, 10) == "next"


async def test_many_concurrent_renderings_are_all_served(renderer: TemplateRenderer) -> None:
    texts = await asyncio.gather(*(renderer.render("{{ n }}", {"n": n}, 10) for n in range(50)))
    assert texts == [str(n) for n in range(50)]


async def test_the_process_does_not_get_the_routers_environment(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "s3cret")
    await renderer.render("start", {}, 10)
    (pid,) = renderer.processes.idle_pids
    environment = await asyncio.to_thread(Path(f"/proc/{pid}/environ").read_text)
    assert "s3cret" not in environment
