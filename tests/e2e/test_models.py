"""Two real models on four shards behind one router, asked by OpenAI's client.

`tests/integration/router/test_serve_models.py` does the same with toy models.
"""

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from caravan_testing.metrics_text import total
from caravan_testing.serve_process import MODEL, Served, serve
from caravan_testing.shard_models import WINDOW_MODEL, fetched
from caravan_testing.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

DEMO, WINDOW = MODEL.name, WINDOW_MODEL.name
FLAGS = ("-np", "4", "-c", "2048", "-t", "1", "--shards", "2")
PROMPTS = ("The capital of France is", "Water boils at", "The opposite of hot is", "Two and two make")


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve(*FLAGS, models=(MODEL, fetched(WINDOW_MODEL))) as running:
        yield running


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def complete(client: OpenAI, model: str, prompt: str, tokens: int = 6) -> str:
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=tokens, temperature=0)
    assert answer.model == model
    return answer.choices[0].text


def test_mixed_load_gets_the_answers_of_the_model_that_it_names(client: OpenAI) -> None:
    alone = {(model, prompt): complete(client, model, prompt) for prompt in PROMPTS for model in (DEMO, WINDOW)}
    for prompt in PROMPTS:
        assert alone[DEMO, prompt] != alone[WINDOW, prompt]
    wanted = 2 * list(alone)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda one: complete(client, *one), wanted))
    for (model, prompt), answer in zip(wanted, answers, strict=True):
        # In company, a near tie may fall otherwise than alone, but not as the other model answers.
        assert answer != alone[WINDOW if model == DEMO else DEMO, prompt]


def test_models_are_listed_and_an_unknown_one_is_not_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEMO, WINDOW]
    assert client.models.retrieve(WINDOW).id == WINDOW
    for path in (client.models.retrieve, lambda model: complete(client, model, "x")):
        with pytest.raises(NotFoundError) as raised:
            path("another")
        assert raised.value.code == "model_not_found"


def test_each_model_has_its_own_vocabulary(client: OpenAI) -> None:
    only_of_window = [250_000]
    answer = client.completions.create(model=WINDOW, prompt=only_of_window, max_tokens=1)
    assert answer.model == WINDOW
    with pytest.raises(BadRequestError, match="must be >= 0 and < 49152"):
        client.completions.create(model=DEMO, prompt=only_of_window, max_tokens=1)


def until_waiting(served: Served, requests: int) -> None:
    """Wait until so many requests wait in the queue."""

    def waiting() -> float:
        with urllib.request.urlopen(f"{served.url}/metrics") as response:
            return total(response.read().decode(), "tgi_queue_size")

    wait_until(waiting, f"{requests} requests wait", lambda found: found >= requests)


def test_a_flood_of_one_model_does_not_starve_the_other(served: Served, client: OpenAI) -> None:
    with ThreadPoolExecutor(32) as pool:
        flood = [pool.submit(complete, client, DEMO, f"Story number {number}:", 24) for number in range(32)]
        until_waiting(served, 16)
        for prompt in PROMPTS[:2]:
            assert complete(client, WINDOW, prompt)
        # It waited for none of those that wait for the other model.
        assert sum(one.done() for one in flood) < 24
        assert all(one.result() for one in flood)
