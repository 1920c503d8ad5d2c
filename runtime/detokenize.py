"""Text of a growing list of tokens, without making all of it again for every token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_SHORT = 8  # tokens that are cheaper to look up than to compare with what is kept


class Detokenizer:
    """The bytes that llama.cpp's tokenizer gives for a list of tokens: the pieces of its tokens, one after another.

    It keeps each token's piece, and the text of the last longer list: a list that continues it costs its new tokens
    only, and a beginning of it costs nothing. One space before the text is dropped where the list begins with the
    token `bos`, as `llama_cpp` does.
    """

    def __init__(self, piece: Callable[[int], bytes], bos: int) -> None:
        """`piece` gives the bytes of one token, of any position."""
        self._piece = piece
        self._bos = bos
        self._pieces: dict[int, bytes] = {}
        self._tokens: list[int] = []
        self._text = b""
        self._ends: list[int] = []

    def text(self, tokens: Sequence[int]) -> bytes:
        """Bytes of `tokens`; they may end in the middle of a character."""
        if len(tokens) <= _SHORT:
            return self.joined(tokens)
        return self._unspaced(self._kept(list(tokens)), tokens)

    def joined(self, tokens: Sequence[int]) -> bytes:
        """The same without a look at what is kept, nor a change of it: for any thread at any time."""
        return self._unspaced(b"".join(map(self._piece_of, tokens)), tokens)

    def _unspaced(self, text: bytes, tokens: Sequence[int]) -> bytes:
        return text[1:] if text[:1] == b" " and tokens[0] == self._bos else text

    def _kept(self, tokens: list[int]) -> bytes:
        known = len(self._tokens)
        if len(tokens) <= known and self._tokens[: len(tokens)] == tokens:
            return self._text[: self._ends[len(tokens) - 1]]
        if tokens[:known] != self._tokens:
            self._tokens, self._text, self._ends, known = [], b"", [], 0
        fresh = [self._piece_of(token) for token in tokens[known:]]
        end = len(self._text)
        for piece in fresh:
            end += len(piece)
            self._ends.append(end)
        self._text += b"".join(fresh)
        self._tokens = tokens
        return self._text

    def _piece_of(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._piece(token)
        return piece
