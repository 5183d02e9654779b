"""Tokenizes and detokenizes by llama.cpp. Its vocabulary is read-only: any thread may use it while the model stays."""

import ctypes
import hashlib
import re
from typing import Any

import llama_cpp

from caravan_proto.messages.model import FillTokens
from caravan_shard.backends.base import ModelUsers, Piece

# Bytes for a piece. A few pieces are longer.
_ROOM = 64
# As in llama.cpp.
_MOST_PADDING = 128
# Tokens that are plain text where control tokens are not parsed.
_CONTROL = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
_PLACE = re.compile(r"\{query\}|\{document\}")


class LlamaVocabulary:
    """A Vocabulary."""

    def __init__(self, vocab: Any, rank_template: bytes = b"") -> None:
        """``vocab``: a llama_vocab pointer, valid as long as its model. ``rank_template``: empty without one."""
        self._vocab = vocab
        self.users = ModelUsers()
        self.size = int(llama_cpp.llama_vocab_n_tokens(vocab))
        self._rank_template = self._split(rank_template.decode(errors="replace"))
        # The end token that the file names is always one. llama.cpp leaves `</s>` out of a vocabulary of some kinds.
        named = {llama_cpp.llama_vocab_eos(vocab)} - {-1}
        found = (token for token in range(self.size) if llama_cpp.llama_vocab_is_eog(vocab, token))
        self.eog_ids = frozenset(found) | named
        self._pieces: dict[int, Piece] = {}

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        """Return the token ids of ``text``; the caller must bound its length."""
        data = text.encode()
        room = len(data) + 8
        tokens = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, room, add_special, parse_special)
        if count < 0:
            room = -count
            tokens = (llama_cpp.llama_token * room)()
            count = llama_cpp.llama_tokenize(self._vocab, data, len(data), tokens, room, add_special, parse_special)
        assert count >= 0, f"llama_tokenize needs {-count} tokens of room and had {room}"
        return list(tokens[:count])

    def fill_tokens(self) -> FillTokens | None:
        """Return the tokens for filling in, which llama.cpp knows by metadata or by their text; None without them."""
        vocab = self._vocab
        prefix, suffix, middle, repository, file = (
            int(token) if (token := find(vocab)) >= 0 else None
            for find in (
                llama_cpp.llama_vocab_fim_pre,
                llama_cpp.llama_vocab_fim_suf,
                llama_cpp.llama_vocab_fim_mid,
                llama_cpp.llama_vocab_fim_rep,
                llama_cpp.llama_vocab_fim_sep,
            )
        )
        if prefix is None or suffix is None or middle is None:
            return None
        begin = int(llama_cpp.llama_vocab_bos(vocab)) if llama_cpp.llama_vocab_get_add_bos(vocab) else None
        return FillTokens(prefix=prefix, suffix=suffix, middle=middle, begin=begin, repository=repository, file=file)

    def pair(self, query: str, document: str) -> list[int]:
        """Return the tokens of a pair as llama-server has them. Control tokens in either text are plain text."""
        if not self._rank_template:
            return self._joined(query, document)
        texts = {"{query}": query, "{document}": document}
        tokens = []
        for part in self._rank_template:
            if isinstance(part, int):
                tokens.append(part)
            else:
                filled = _PLACE.sub(lambda place: texts[place[0]], part)
                tokens += self.tokenize(filled, add_special=False, parse_special=False)
        return tokens

    def _split(self, template: str) -> list[str | int]:
        """Return the texts of a template and the control tokens between them. As in llama.cpp, long ones come first."""
        if not template:
            return []
        vocab = self._vocab
        found = {}
        for token in range(self.size):
            if llama_cpp.llama_vocab_get_attr(vocab, token) & _CONTROL:
                text = llama_cpp.llama_vocab_get_text(vocab, token).decode(errors="replace")
                if text and text in template:
                    found[text] = token
        parts: list[str | int] = [template]
        for text in sorted(found, key=len, reverse=True):
            parts = [piece for part in parts for piece in _cut(part, text, found[text])]
        return parts

    def _joined(self, query: str, document: str) -> list[int]:
        vocab = self._vocab
        eos = llama_cpp.llama_vocab_eos(vocab)
        end = (
            [eos if eos >= 0 else llama_cpp.llama_vocab_sep(vocab)] if llama_cpp.llama_vocab_get_add_eos(vocab) else []
        )
        return [
            *([llama_cpp.llama_vocab_bos(vocab)] if llama_cpp.llama_vocab_get_add_bos(vocab) else []),
            *self.tokenize(query, add_special=False, parse_special=False),
            *end,
            *([llama_cpp.llama_vocab_sep(vocab)] if llama_cpp.llama_vocab_get_add_sep(vocab) else []),
            *self.tokenize(document, add_special=False, parse_special=False),
            *end,
        ]

    def difference(self, other: "LlamaVocabulary") -> str | None:
        """Return the first difference of ``other``, the vocabulary of a draft model; None if the tokens are the same.

        One may have a few tokens more at its end, with which files are padded.
        """
        ours, theirs = self._vocab, other._vocab
        if abs(self.size - other.size) > _MOST_PADDING:
            return f"it has {other.size} tokens, the model {self.size}"
        kinds = llama_cpp.llama_vocab_type(theirs), llama_cpp.llama_vocab_type(ours)
        if kinds[0] != kinds[1]:
            return f"its tokenizer is of type {kinds[0]}, that of the model of type {kinds[1]}"
        for name, get in (("begin", llama_cpp.llama_vocab_bos), ("end", llama_cpp.llama_vocab_eos)):
            if get(ours) != get(theirs):
                return f"its {name} token is {get(theirs)}, that of the model {get(ours)}"
        for token in range(min(self.size, other.size)):
            texts = llama_cpp.llama_vocab_get_text(theirs, token), llama_cpp.llama_vocab_get_text(ours, token)
            if texts[0] != texts[1]:
                its, models = (text.decode(errors="replace") for text in texts)
                return f"its token {token} is {its!r}, that of the model {models!r}"
            if (token in self.eog_ids) != (token in other.eog_ids):
                return f"token {token}, {texts[0].decode(errors='replace')!r}, ends the text of one of them only"
        return None

    def fingerprint(self) -> str:
        """Return the SHA-256 of the texts of all tokens, and of which ones end an output."""
        digest = hashlib.sha256(str(sorted(self.eog_ids)).encode())
        for token in range(self.size):
            text = llama_cpp.llama_vocab_get_text(self._vocab, token)
            digest.update(len(text).to_bytes(4, "little") + text)
        return digest.hexdigest()

    def piece(self, token: int) -> Piece:
        """Return the piece of a token; made once."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._make_piece(token, ctypes.create_string_buffer(_ROOM))
        return piece

    def pieces(self) -> list[Piece]:
        """Return the pieces of all tokens; not kept, since each takes 200 bytes."""
        buffer = ctypes.create_string_buffer(_ROOM)
        return [self._make_piece(token, buffer) for token in range(self.size)]

    def text(self, token: int) -> str:
        """Return the text of a control token such as BOS; empty for -1, llama.cpp's id for no token."""
        return self.piece(token).data.decode(errors="replace") if token >= 0 else ""

    def _make_piece(self, token: int, buffer: Any) -> Piece:
        assert 0 <= token < self.size, f"token {token} of {self.size}"
        room = _ROOM
        length = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, room, 0, True)
        if length < 0:
            room = -length
            buffer = ctypes.create_string_buffer(room)
            length = llama_cpp.llama_token_to_piece(self._vocab, token, buffer, room, 0, True)
        assert length >= 0, f"the piece of token {token} needs {-length} bytes and had {room}"
        special = token in self.eog_ids or bool(llama_cpp.llama_vocab_is_control(self._vocab, token))
        return Piece(buffer[:length], special)


def missing_of_pairs(vocab: Any) -> str:
    """Return the name of a token that pairs without a template need, and that the file does not name; "" if none."""
    sep = llama_cpp.llama_vocab_sep(vocab)
    for name, is_added, token in (
        ("begin (bos)", llama_cpp.llama_vocab_get_add_bos(vocab), llama_cpp.llama_vocab_bos(vocab)),
        ("end (eos)", llama_cpp.llama_vocab_get_add_eos(vocab), max(llama_cpp.llama_vocab_eos(vocab), sep)),
        ("separator (sep)", llama_cpp.llama_vocab_get_add_sep(vocab), sep),
    ):
        if is_added and token < 0:
            return name
    return ""


def _cut(part: str | int, text: str, token: int) -> list[str | int]:
    """Return a part of a template with ``token`` in each place of its ``text``."""
    if isinstance(part, int):
        return [part]
    first, *others = part.split(text)
    pieces: list[str | int] = [first]
    for other in others:
        pieces += [token, other]
    return [piece for piece in pieces if piece != ""]
