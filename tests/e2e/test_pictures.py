"""Client libraries send pictures unmodified, and get what the words would have got that the pictures spell.

llama.cpp reads the pictures with a projector that gives a patch the embedding of a word.
"""

import base64
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import InferenceClient
from openai import BadRequestError, OpenAI
from PIL import Image

from caravan_studio.recording.lines import RecordingFile
from caravan_studio.replay.player import Player, play
from caravan_testing.gguf_file import fields_of
from caravan_testing.projectors import write_spelling_projector
from caravan_testing.recorded import differences
from caravan_testing.serve_process import ROOT, Served, serve
from caravan_testing.shard_models import WORDS_MODEL, fetched
from caravan_testing.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.model]

WORDS = " The sky is blue and the sea is green in the light of a summer day"
TOKENS = 12


@dataclass(frozen=True)
class Seeing:
    """A server whose model reads ``picture`` as WORDS, and which records what it decides."""

    served: Served
    picture: Path
    recording: Path

    @property
    def base64(self) -> str:
        return base64.b64encode(self.picture.read_bytes()).decode()

    @property
    def url(self) -> str:
        return f"data:image/png;base64,{self.base64}"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeing]:
    folder = tmp_path_factory.mktemp("pictures")
    model = fetched(WORDS_MODEL)
    known = {token: number for number, token in enumerate(fields_of(model)["tokenizer.ggml.tokens"].value)}
    tokens = [known[f"\u0120{word}"] for word in WORDS.split()]
    speller = write_spelling_projector(folder / "projector.gguf", model, [*dict.fromkeys(tokens)])
    picture = folder / "picture.png"
    Image.fromarray(speller.picture(tokens)).save(picture)
    recording = folder / "recording"
    flags = ("--mmproj", str(folder / "projector.gguf"), "--record", str(recording), "--kv-layout", "split")
    with serve("-np", "4", "-c", "16384", "-t", "1", *flags, models=(model,)) as served:
        yield Seeing(served, picture, recording)


def test_openai_python_sends_pictures_in_chats(seeing: Seeing) -> None:
    said = []
    with OpenAI(base_url=f"{seeing.served.url}/v1", api_key="none") as client:
        extra = client.models.list().data[0].model_extra or {}
        assert extra["architecture"]["input_modalities"] == ["text", "image"]
        picture: Any = {"type": "image_url", "image_url": {"url": seeing.url, "detail": "high"}}
        # Between two parts of text there would be a line break.
        text = f"See:{WORDS} Well?"
        for content in ([{"type": "text", "text": "See:"}, picture, {"type": "text", "text": " Well?"}], text):
            messages: Any = [{"role": "user", "content": content}]
            reply = client.chat.completions.create(model="any", messages=messages, max_tokens=TOKENS, temperature=0)
            assert reply.usage is not None
            said.append((reply.choices[0].message.content, reply.usage.prompt_tokens))
        assert said[0] == said[1]
        picture["image_url"]["url"] = "https://example.com/a.png"
        with pytest.raises(BadRequestError, match="nothing is fetched"):
            client.chat.completions.create(model="any", messages=[{"role": "user", "content": [picture]}])


def test_openai_python_sends_pictures_in_responses_and_conversations(seeing: Seeing) -> None:
    said = []
    with OpenAI(base_url=f"{seeing.served.url}/v1", api_key="none") as client:
        picture = {"type": "input_image", "image_url": seeing.url}
        for content in ([{"type": "input_text", "text": "See:"}, picture], f"See:{WORDS}"):
            turn: Any = [{"role": "user", "content": content}]
            common: Any = {"model": "any", "max_output_tokens": TOKENS, "temperature": 0}
            first = client.responses.create(input=turn, **common)
            second = client.responses.create(input="And then?", previous_response_id=first.id, **common)
            assert first.usage is not None
            said.append((first.output_text, second.output_text, first.usage.input_tokens))
        assert said[0] == said[1]


def test_huggingface_hub_sends_pictures(seeing: Seeing) -> None:
    client = InferenceClient(seeing.served.url)
    said = []
    picture = {"type": "image_url", "image_url": {"url": seeing.url}}
    for content in ([{"type": "text", "text": "See:"}, picture], f"See:{WORDS}"):
        messages: Any = [{"role": "user", "content": content}]
        said.append(client.chat_completion(messages, max_tokens=TOKENS, temperature=0).choices[0].message.content)
    assert said[0] == said[1]
    shown = client.text_generation(f"See:![]({seeing.url}) and", max_new_tokens=TOKENS)
    assert shown == client.text_generation(f"See:{WORDS} and", max_new_tokens=TOKENS)


async def test_what_it_decides_is_recorded_and_played_again(seeing: Seeing) -> None:
    client = InferenceClient(seeing.served.url)
    client.text_generation(f"Record:![]({seeing.url})", max_new_tokens=TOKENS)
    decided: list[list[Any]] = []

    def is_there() -> bool:
        """Whether the recording, which goes on, has an encoding and what is sampled behind it."""
        decided[:] = [one for played in play(RecordingFile(seeing.recording), Player()) for one in played.decisions]
        kinds = [one[0] for one in decided]
        return "encode" in kinds and "deliver" in kinds[kinds.index("encode") :]

    await eventually(is_there, "the recording has the request")
    assert differences(seeing.recording) == []


@pytest.mark.parametrize(
    "name",
    [
        "text-generation",
        pytest.param("anthropic", marks=pytest.mark.clients),
        pytest.param("ollama", marks=pytest.mark.clients),
    ],
)
def test_a_client_in_its_own_environment_sends_pictures(seeing: Seeing, name: str) -> None:
    python = ROOT / f".cache/clients/{name}/bin/python"
    assert python.exists(), f"no environment for {name}: run `make test-clients`"
    script = Path(__file__).parent / "clients/pictures.py"
    command = [str(python), str(script), name, seeing.served.url, str(seeing.picture), WORDS]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stderr
    said = json.loads(run.stdout.splitlines()[-1])
    half = len(said) // 2
    if name == "anthropic":
        assert said[:half] == said[half:]
    else:
        assert said[::2] == said[1::2]
    assert all(said)
