"""Token ids to text, a few at a time, at the same cost for each however long the answer is."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from trioserve.text.tokenizer import Tokenizer

_Utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one answer, as its tokens arrive.

    Tokens are bytes, and bytes become characters as soon as they are whole; nothing is decoded
    twice, and at most 3 bytes are held back. The pieces joined are the answer's bytes decoded at
    once, with U+FFFD for bytes that are not UTF-8. For byte-level tokenizers that is exactly what
    ``Tokenizer.decode`` gives.

    Sentencepiece writes a word with the space before it and drops that space at the start of a
    text. The start is the start of the prompt: after a prompt that has text, ``▁Paris`` is
    `` Paris``, so that prompt and answer joined read right; after an empty prompt, or one of
    control tokens only, it is ``Paris``. And where the library writes one U+FFFD for each byte of
    a run of byte tokens that is not UTF-8 as a whole, we keep what is whole in it.

    An answer is decoded on its own: bytes of a character that the prompt left unfinished (only
    prompts given as ids can) are not completed.

    Attributes:
        num_held_bytes: bytes of a character that is not whole yet; 0 to 3.
    """

    __slots__ = (
        "_at_start",
        "_skip_special",
        "_strip_left",
        "_tokenizer",
        "_utf8",
        "num_held_bytes",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """Looks at the prompt only as far as its first visible character.

        Raises:
            ModelError: the tokenizer cannot be decoded token by token.
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = _Utf8(errors="replace")
        self.num_held_bytes = 0
        tokenizer.token_bytes(0)  # raises here rather than in the middle of an answer
        rules = tokenizer.rules
        self._at_start = rules is not None and rules.depends_on_start  # nothing settled yet
        self._strip_left = rules.strip_count if rules is not None else 0
        for token_id in prompt_token_ids:
            if not self._at_start:
                break
            self._bytes(token_id)

    def push(self, token_ids: Iterable[int]) -> str:
        """The characters that these tokens complete."""
        return self._decode(b"".join([self._bytes(token_id) for token_id in token_ids]))

    def step(self, token_id: int) -> tuple[bytes, str]:
        """One token: the bytes it adds to the answer, and the characters it completes."""
        data = self._bytes(token_id)
        return data, self._decode(data)

    def finish(self) -> str:
        """The end of the text: one U+FFFD for a character that was cut, else nothing.

        Streamed and plain answers both end this way.
        """
        self.num_held_bytes = 0
        return self._utf8.decode(b"", final=True)

    def _decode(self, data: bytes) -> str:
        if not data:
            return ""
        text = self._utf8.decode(data)
        # After an ASCII byte nothing can be pending; asking the decoder costs more than decoding.
        self.num_held_bytes = len(self._utf8.getstate()[0]) if data[-1] >= 0x80 else 0
        return text

    def _bytes(self, token_id: int) -> bytes:
        if self._skip_special and self._tokenizer.is_special(token_id):
            return b""
        if self._at_start:
            return self._bytes_at_start(token_id)
        return self._tokenizer.token_bytes(token_id)

    def _bytes_at_start(self, token_id: int) -> bytes:
        if self._tokenizer.token_content(token_id) is None:
            return b""
        rules = self._tokenizer.rules
        assert rules is not None
        data = self._tokenizer.first_token_bytes(token_id)
        while self._strip_left and data.startswith(rules.strip):
            data = data[len(rules.strip) :]
            self._strip_left -= 1
        if data:
            self._strip_left = 0
        self._at_start = self._strip_left > 0
        return data
