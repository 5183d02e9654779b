"""How long ``keep_alive`` says that a model stays loaded."""

import math

import pytest

from caravan_dialects.api.errors import ValidationError
from caravan_dialects.api.ollama.validation import seconds_of


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
