"""The responses under way, as the state that handlers share."""

from aiohttp import web

from caravan_dialects.api.openai.responses.running import RunningResponses

RUNNING = web.AppKey("running", RunningResponses)
