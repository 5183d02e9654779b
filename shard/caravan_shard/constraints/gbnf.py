"""Translates GBNF, llama.cpp's grammar notation, to Lark by llguidance's converter, and works around its faults."""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

# Strings, character classes, comments, and the dot that stands for any character.
_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|\.', re.DOTALL)
_ESCAPES = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ASCII = 0x80


def lark_from_gbnf(source: str) -> str:
    """Return the grammar in Lark; raises ValueError."""
    try:
        return str(gbnf_to_lark(_PARTS.sub(_normalize, source)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except Exception as error:  # the converter raises plain Exception for syntax it does not understand
        raise ValueError(str(error)) from error


def _normalize(match: re.Match[str]) -> str:
    part = match[0]
    if part == ".":
        # Lark's dot does not match a line break.
        return '(. | "\\n")'
    return part if part.startswith("#") else _ESCAPES.sub(_plain, part)


def _plain(match: re.Match[str]) -> str:
    """Rewrite an escape: the converter strips leading zeros off long escapes, and does not know ``\\-``."""
    digits = match[1] or match[2]
    if digits is None:
        return "\\x2d" if match[3] == "-" else match[0]
    code = int(digits, 16)
    if code < _ASCII:
        return f"\\x{code:02x}"
    if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
        raise ValueError(f"{match[0]} is no character")
    return chr(code)
