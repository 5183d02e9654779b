from caravan_dialects.text.detokenize import IncrementalDecoder


def test_a_character_split_over_tokens_is_held_back_until_it_is_whole() -> None:
    decoder = IncrementalDecoder()
    assert [decoder.push(bytes([byte])) for byte in "é🙂".encode()] == ["", "é", "", "", "", "🙂"]
    assert decoder.flush() == ""


def test_invalid_bytes_become_replacement_characters_at_once() -> None:
    decoder = IncrementalDecoder()
    assert decoder.push(b"a\xffb") == "a\N{REPLACEMENT CHARACTER}b"


def test_an_unfinished_character_at_the_end_becomes_a_replacement_character() -> None:
    decoder = IncrementalDecoder()
    assert decoder.push("🙂".encode()[:3]) == ""
    assert decoder.flush() == "\N{REPLACEMENT CHARACTER}"
