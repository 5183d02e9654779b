"""Finds what a made model adds to the requests of Ollama's routes."""

from aiohttp import web

from caravan_dialects.api.ollama.recipe import NO_RECIPE, Recipe, recipe_of
from caravan_dialects.api.ollama.validation import bare_name
from caravan_router.http.generation.models import asked_model
from caravan_router.http.server.state import STATE


def recipe_for(request: web.Request, model: str | None) -> Recipe:
    """Return the recipe of the model that a request asks for; one that says nothing, if it was not made of another."""
    catalogue = request.app[STATE].catalogue
    made = None if catalogue is None else catalogue.made(asked_model(request, bare_name(model)))
    return NO_RECIPE if made is None else recipe_of(made.recipe)
