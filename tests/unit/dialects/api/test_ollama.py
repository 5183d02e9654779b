"""What a model that was made of another one adds to requests, and how long a model stays loaded."""

import math

import msgspec
import pytest

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.ollama.recipe import (
    NO_RECIPE,
    Recipe,
    changed_recipe,
    chat_with,
    generation_with,
    parameters_text,
    recipe_of,
    stored_recipe,
)
from caravan_dialects.api.ollama.schema import (
    OllamaChatRequest,
    OllamaCreateRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
)
from caravan_dialects.api.ollama.validation import seconds_of

PIRATE = Recipe(parameters=OllamaOptions(temperature=0.5, stop=["a", "b"]), system="Be a pirate.", license=["MIT"])
HI = OllamaMessage(role="user", content="hi")


def test_a_chat_has_the_system_message_and_the_options_that_it_does_not_set() -> None:
    body = OllamaChatRequest(model="pirate", messages=[HI], options=OllamaOptions(temperature=0.0, top_k=3))
    meant = chat_with(PIRATE, body)
    assert meant.messages == [OllamaMessage(role="system", content="Be a pirate."), HI]
    assert meant.options == OllamaOptions(temperature=0.0, top_k=3, stop=["a", "b"])
    own = OllamaMessage(role="system", content="Be a parrot.")
    assert chat_with(PIRATE, OllamaChatRequest(model="pirate", messages=[own, HI])).messages == [own, HI]


def test_a_generation_has_the_system_message_unless_it_says_otherwise() -> None:
    def system(**fields: object) -> str | None:
        body = msgspec.convert({"model": "pirate", "prompt": "hi", **fields}, OllamaGenerateRequest)
        return generation_with(PIRATE, body).system

    assert system() == "Be a pirate."
    assert system(system="Be a parrot.") == "Be a parrot."
    assert system(system="") == ""
    assert system(raw=True) is system(suffix="x") is system(context=[1]) is None


def test_no_recipe_changes_nothing() -> None:
    chat, generation = OllamaChatRequest(model="m", messages=[HI]), OllamaGenerateRequest(model="m", prompt="hi")
    assert chat_with(NO_RECIPE, chat) is chat
    assert generation_with(NO_RECIPE, generation) is generation


def test_what_is_made_of_a_made_model_has_what_it_does_not_say_itself() -> None:
    options = OllamaOptions(temperature=1.0, seed=7)
    made = changed_recipe(PIRATE, OllamaCreateRequest(from_="pirate", model="second", parameters=options))
    assert made.parameters == OllamaOptions(temperature=1.0, seed=7, stop=["a", "b"])
    assert (made.system, made.license) == (PIRATE.system, PIRATE.license)
    other = changed_recipe(PIRATE, OllamaCreateRequest(from_="pirate", model="third", system="", license="BSD"))
    assert (other.system, other.license) == ("", ["BSD"])


@pytest.mark.parametrize("recipe", [PIRATE, NO_RECIPE, Recipe(system="x")])
def test_a_recipe_can_be_stored(recipe: Recipe) -> None:
    stored = msgspec.json.decode(msgspec.json.encode(stored_recipe(recipe)))
    assert recipe_of(stored) == recipe
    assert stored_recipe(NO_RECIPE) == {}


def test_parameters_are_shown_as_ollama_shows_them() -> None:
    lines = parameters_text(PIRATE.parameters).splitlines()
    assert [line.split() for line in lines] == [["temperature", "0.5"], ["stop", '"a"'], ["stop", '"b"']]


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        ("", None),
        (0, 0.0),
        ("0", 0.0),
        (300, 300.0),
        (1.5, 1.5),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("250ms", 0.25),
        ("-1", math.inf),
        (-1, math.inf),
        ("-1m", math.inf),
    ],
)
def test_seconds(given: str | float | None, seconds: float | None) -> None:
    assert seconds_of(given) == seconds


@pytest.mark.parametrize("given", ["2 weeks", "5 m", "m", "1h30", "--1m", "nan", "5m5"])
def test_what_is_no_duration_is_refused(given: str) -> None:
    with pytest.raises(ValidationError, match=f"`keep_alive` must be .* Given: '{given}'"):
        seconds_of(given)
