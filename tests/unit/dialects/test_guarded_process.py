"""Processes end while nobody asks them, on the event loop that the router has."""

import asyncio

import uvloop

from caravan_dialects.chat.template_renderer import TemplateRenderer


def test_a_process_of_which_only_the_pipe_is_known_to_be_closed_loses_no_request() -> None:
    """A process that is killed closes its pipes first, and may be asked before its status is known."""

    async def ask() -> str:
        renderer = TemplateRenderer(time_limit_s=60.0)
        try:
            await renderer.render("start", {}, 10)
            (process,) = renderer.processes._idle
            assert process.stdin is not None
            process.stdin.close()
            await asyncio.sleep(0)  # in the loop's next turn the pipe is closed
            return await renderer.render("{{ 1 + 1 }}", {}, 10)
        finally:
            await renderer.close()

    assert uvloop.run(ask()) == "2"
