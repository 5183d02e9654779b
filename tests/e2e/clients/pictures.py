"""Runs in the environment of a client and prints as JSON what that client got for a picture and for its text.

Arguments: the client, the URL of a server, the file of a picture, and the text that the picture spells.
"""

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path

TOKENS = 12
Said = list[str]


def of_anthropic(url: str, picture: Path, words: str) -> Said:
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none")
    data = base64.b64encode(picture.read_bytes()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    said = []
    picture_block = {"type": "image", "source": source}
    # Between two blocks of text there would be a line break.
    for content in ([{"type": "text", "text": "See:"}, picture_block], f"See:{words}"):
        for result in (content, [{"type": "tool_result", "tool_use_id": "t", "content": content}]):
            messages = [
                {"role": "user", "content": "Look"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
                {"role": "user", "content": result},
            ]
            message = client.messages.create(
                model="any", max_tokens=TOKENS, messages=messages, extra_body={"temperature": 0}
            )
            said.append("".join(part.text for part in message.content if part.type == "text"))
    return said


def of_ollama(url: str, picture: Path, words: str) -> Said:
    from ollama import Client

    client = Client(url)
    options = {"temperature": 0, "num_predict": TOKENS}
    said = []
    for images, text in (([picture], ""), ([], words), ([picture.read_bytes()], ""), ([], words)):
        message = {"role": "user", "content": f"{text}?", **({"images": images} if images else {})}
        said.append(client.chat("any", [message], options=options).message.content or "")
    said.append(client.generate("any", "?", images=[picture], options=options).response)
    said.append(client.generate("any", f"{words}?", options=options).response)
    assert "vision" in (client.show("any").capabilities or [])
    return said


def of_text_generation(url: str, picture: Path, words: str) -> Said:
    from text_generation import Client

    client = Client(url, timeout=600)
    data = base64.b64encode(picture.read_bytes()).decode()
    shown = f"See:![](data:image/png;base64,{data}) and"
    said = [client.generate(text, max_new_tokens=TOKENS).generated_text for text in (shown, f"See:{words} and")]
    events = client.generate_stream(shown, max_new_tokens=TOKENS)
    return [*said, "".join(event.token.text for event in events), said[1]]


CLIENTS: dict[str, Callable[[str, Path, str], Said]] = {
    "anthropic": of_anthropic,
    "ollama": of_ollama,
    "text-generation": of_text_generation,
}

if __name__ == "__main__":
    name, server, file, spelled = sys.argv[1:]
    print(json.dumps(CLIENTS[name](server, Path(file), spelled)))
