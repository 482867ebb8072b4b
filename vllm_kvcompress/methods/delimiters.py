"""Which tokens are delimiters, as a table by token id.

A token is a delimiter if its text is not empty and every character of it is one of `DELIMITERS`.
The text is what the tokenizer itself decodes, so SentencePiece's and byte-level BPE's ways to write
a space (U+2581, U+0120) need no rule here.

Byte-level vocabularies may spread one character over several tokens. Tokens whose own bytes are
not valid UTF-8 are *fragments*; they are judged together with their neighbours when a prompt is
classified.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

DELIMITERS = frozenset(
    " \t\n\r\u2028\u3000"  # space, tab, line ends, ideographic space
    ".,?!;:\u2026"
    "{}"  # with the semicolon, code
    "\u3002\uff01\uff1f\uff1b\uff1a\uff0c\u3001\uff0e"  # CJK, full width
    "\uff61\uff64"  # CJK, half width
    "\u060c\u061b\u061f\u06d4"  # Arabic comma, semicolon, question mark, full stop
    "\u0964\u0965"  # Devanagari danda and double danda
)

_STRIP = "".join(DELIMITERS)
_SEPARATOR = 0xFF  # in no UTF-8 text
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The characters in which byte-level BPE writes bytes: printable ones stand for themselves,
    the others take the code points from 256 on, in order (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + i): byte for i, byte in enumerate(others)},
    }


_BYTES = _byte_alphabet()


def _piece_bytes(piece: str) -> bytes | None:
    """Bytes of a vocabulary entry of byte-level BPE or of byte fallback, else None."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    if all(char in _BYTES for char in piece):
        return bytes(_BYTES[char] for char in piece)
    return None


def _encoded(num_bytes: int) -> np.ndarray:
    """Delimiters that take ``num_bytes`` in UTF-8, as big-endian numbers."""
    encoded = [char.encode() for char in DELIMITERS]
    return np.array([int.from_bytes(e, "big") for e in encoded if len(e) == num_bytes], np.uint32)


_ENCODED = {num_bytes: _encoded(num_bytes) for num_bytes in (1, 2, 3)}


class DelimiterTable:
    """Answers for any token id whether it is a delimiter. Build it with `from_tokenizer`.

    Args:
        delimiter: bool ``[V]``, for tokens that can be judged alone.
        fragments: bytes of the fragments, by token id.
    """

    def __init__(self, delimiter: np.ndarray, fragments: dict[int, bytes]) -> None:
        # one row more, for ids that the tokenizer does not know
        self._delimiter = np.append(delimiter, False)
        self._length = np.zeros(len(self._delimiter), np.int64)
        self._start = np.zeros(len(self._delimiter), np.int64)
        self._bytes = np.frombuffer(b"".join(fragments.values()), np.uint8)
        start = 0
        for token, content in fragments.items():
            self._length[token] = len(content)
            self._start[token] = start
            start += len(content)

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> DelimiterTable:
        """Decode the whole vocabulary once.

        Args:
            tokenizer: a transformers tokenizer. Its special tokens are no delimiters.
        """
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {*tokenizer.all_special_ids, *(i for i, token in added.items() if token.special)}
        ids = sorted(set(tokenizer.get_vocab().values()) - special)
        pieces = dict(zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True))
        # decoders drop the space that begins a text, so every token is decoded after a letter
        anchor = [i for i, p in pieces.items() if len(p) == 1 and p.isascii() and p.isalnum()][:1]
        decode = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        prefix = tokenizer.decode(anchor, **decode) if anchor else ""
        texts = tokenizer.batch_decode([[*anchor, i] for i in ids], **decode)

        delimiter = np.zeros(max(ids, default=-1) + 1, bool)
        fragments: dict[int, bytes] = {}
        for token, text in zip(ids, texts, strict=True):
            text = text.removeprefix(prefix)
            delimiter[token] = text != "" and not text.strip(_STRIP)
            if "\ufffd" in text:
                content = _piece_bytes(pieces[token])
                # the decoder must agree that these are the bytes, and that they are incomplete
                if content and not _is_utf8(content) and content.decode(errors="replace") == text:
                    fragments[token] = content
        return cls(delimiter, fragments)

    def classify(self, token_ids: np.ndarray) -> np.ndarray:
        """Which tokens of a text are delimiters, in time linear in their number.

        Args:
            token_ids: int ``[n]``; ids that the tokenizer does not know are no delimiters.

        Returns:
            bool ``[n]``.
        """
        unknown = len(self._delimiter) - 1
        known = (token_ids >= 0) & (token_ids < unknown)
        ids = np.where(known, token_ids, unknown)
        result = self._delimiter[ids]
        fragments = np.flatnonzero(self._length[ids])
        if fragments.size:
            result[fragments] = self._classify_fragments(ids[fragments], fragments)
        return result

    def _classify_fragments(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """A fragment is a delimiter if it has a part in a delimiter's character and neither it
        nor the other tokens of that character hold anything but delimiters.

        Args:
            ids: ``[f]``, fragments only.
            positions: ``[f]``, where they stand in the text, rising.

        Returns:
            bool ``[f]``.
        """
        # all bytes one after another, with a separator wherever other tokens stand between
        lengths = self._length[ids]
        gap = np.diff(positions, prepend=-2) != 1
        first = np.cumsum(lengths) - lengths  # of each token, among the bytes
        within = np.arange(lengths.sum()) - np.repeat(first, lengths)
        at = np.repeat(first + np.cumsum(gap), lengths) + within  # of each byte, in the stream
        stream = np.full(at[-1] + 1, _SEPARATOR, np.uint32)
        stream[at] = self._bytes[np.repeat(self._start[ids], lengths) + within]
        owner = np.zeros(len(stream), np.int64)
        owner[at] = np.repeat(np.arange(len(ids)), lengths)

        # UTF-8 synchronises itself: a character's bytes occur nowhere but where it stands
        found = {}
        covered = np.zeros(len(stream), bool)
        for num_bytes, encoded in _ENCODED.items():
            places = max(len(stream) - num_bytes + 1, 0)
            codes = np.zeros(places, np.uint32)
            for i in range(num_bytes):
                codes = (codes << 8 | stream[i : i + places]).astype(np.uint32)
            found[num_bytes] = np.flatnonzero(np.isin(codes, encoded))
            for i in range(num_bytes):
                covered[found[num_bytes] + i] = True
        pure = np.logical_and.reduceat(covered[at], first)

        result = np.zeros(len(ids), bool)
        for num_bytes in (2, 3):
            owners = owner[found[num_bytes][:, None] + np.arange(num_bytes)]
            result[owners[pure[owners].all(axis=1)]] = True
        return result


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True
