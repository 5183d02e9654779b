"""Applies ``keep_alive`` of Ollama's requests."""

from aiohttp import web

from caravan_dialects.api.generation.models import model_name
from caravan_dialects.api.ollama.keep_alive import seconds_of
from caravan_dialects.api.ollama.validation import bare_name
from caravan_router.http.generation.models import asked_model
from caravan_router.http.server.state import STATE


def keep_model(request: web.Request, model: str | None, keep_alive: str | float | None) -> None:
    """Let the model stay as long as the request says, if it is of the catalogue.

    Raises ValidationError, UnknownModelError.
    """
    seconds, state = seconds_of(keep_alive), request.app[STATE]
    if seconds is not None and state.catalogue is not None:
        name = model_name(state.fleet, asked_model(request, bare_name(model)))
        if state.catalogue.find(name) is not None:
            state.catalogue.keep(name, seconds)
