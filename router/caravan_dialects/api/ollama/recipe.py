"""What a model that was made of another one adds to requests of Ollama's routes."""

from collections.abc import Mapping

import msgspec

from caravan_dialects.api.ollama import schema as ollama

_NO_OPTIONS = ollama.OllamaOptions()
_SHOWN_WIDTH = 30


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options and a system message that a request has unless it says otherwise; and licences, to be shown."""

    parameters: ollama.OllamaOptions = _NO_OPTIONS
    system: str = ""
    license: list[str] = []


NO_RECIPE = Recipe()


def recipe_of(stored: Mapping[str, object]) -> Recipe:
    """Return a recipe that `stored_recipe` has made storable. Raises msgspec.ValidationError."""
    return msgspec.convert(stored, Recipe)


def stored_recipe(recipe: Recipe) -> dict[str, object]:
    """Return a recipe as an object of JSON, without what it does not say."""
    given = options_given(recipe.parameters)
    stored: dict[str, object] = msgspec.to_builtins(msgspec.structs.replace(recipe, parameters=_NO_OPTIONS))
    return stored | ({"parameters": given} if given else {})


def changed_recipe(recipe: Recipe, body: ollama.OllamaCreateRequest) -> Recipe:
    """Return the recipe of a model that ``body`` makes of one with ``recipe``: what the body says prevails."""
    licences = [body.license] if isinstance(body.license, str) else body.license
    return Recipe(
        parameters=options_with(recipe.parameters, body.parameters),
        system=recipe.system if body.system is None else body.system,
        license=recipe.license if licences is None else licences,
    )


def chat_with(recipe: Recipe, body: ollama.OllamaChatRequest) -> ollama.OllamaChatRequest:
    """Return the request that a chat with a made model means."""
    if recipe is NO_RECIPE:
        return body
    messages = body.messages or []
    if recipe.system and messages and messages[0].role != "system":
        messages = [ollama.OllamaMessage(role="system", content=recipe.system), *messages]
    return msgspec.structs.replace(body, messages=messages, options=options_with(recipe.parameters, body.options))


def generation_with(recipe: Recipe, body: ollama.OllamaGenerateRequest) -> ollama.OllamaGenerateRequest:
    """Return the request that a generation of a made model means. A context has the system message already."""
    if recipe is NO_RECIPE:
        return body
    takes_system = body.system is None and not (body.raw or body.suffix or body.context)
    return msgspec.structs.replace(
        body,
        system=recipe.system or None if takes_system else body.system,
        options=options_with(recipe.parameters, body.options),
    )


def parameters_text(options: ollama.OllamaOptions) -> str:
    """Return options as Ollama shows them: a line for each, strings in quotes."""
    lines = []
    for name, value in options_given(options).items():
        for one in value if isinstance(value, list) else [value]:
            shown = msgspec.json.encode(one).decode() if isinstance(one, str) else str(one)
            lines.append(f"{name:<{_SHOWN_WIDTH}} {shown}")
    return "\n".join(lines)


def options_given(options: ollama.OllamaOptions | None) -> dict[str, object]:
    """Return the options that are set, by name."""
    return {name: value for name, value in msgspec.structs.asdict(options or _NO_OPTIONS).items() if value is not None}


def options_with(defaults: ollama.OllamaOptions, options: ollama.OllamaOptions | None) -> ollama.OllamaOptions:
    """Return ``defaults`` but for what ``options`` set."""
    return msgspec.structs.replace(defaults, **options_given(options))
