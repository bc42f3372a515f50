"""Text to token ids, and token ids to bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from trioserve.errors import InvalidRequest, ModelError
from trioserve.text.token_bytes import (
    BYTE_ALPHABET,
    ByteRules,
    UnsupportedDecoder,
    bytes_without_token,
    keeps_all_text,
    read_decoder,
    shrink_factor,
)

_CHUNK_CHARS = 1 << 16


class _ModelPart(msgspec.Struct):
    type: str | None = None
    byte_fallback: bool | None = None


class _File(msgspec.Struct):
    """The members of a tokenizer.json that decide how bytes and tokens relate."""

    model: _ModelPart
    decoder: dict[str, Any] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None


class Tokenizer:
    """A ``tokenizer.json``: the `tokenizers` library to encode, our own rules to decode.

    Made once per engine; that takes up to a second for a large vocabulary, so do it in a thread.
    All methods are safe to call from several threads; ``encode`` lets go of the interpreter while
    it works, so that a long text in a thread does not hold up the event loop.

    Attributes:
        path: the file.
        rules: how tokens become bytes, or None where that cannot be done one token at a time.
        decoder_fault: the reason in that case; such a tokenizer serves embeddings, not generation.
        vocab_size: number of tokens, added ones included. A model may have more rows than this;
            ids without a token stand for no text.
        num_token_ids: ids from here on have no token; more than ``vocab_size`` where ids have gaps.
        max_token_bytes: a token stands for at most so many bytes of a text as it was sent.
            Infinite where no such bound is known, see ``min_num_tokens``.
    """

    def __init__(self, path: str) -> None:
        """Read the file.

        Raises:
            ModelError: it is missing, unreadable, or not what the tokenizers library writes.
        """
        import tokenizers

        self.path = path
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ModelError(f"cannot read tokenizer {path}: {error.strerror}") from error
        try:
            parts = msgspec.json.decode(data, type=_File)
            self._library = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises plain Exception
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"{path} is not a usable tokenizer.json: {reason}") from error
        # A file may ask for both, which is for training: a server would lose half a prompt.
        self._library.no_truncation()
        self._library.no_padding()
        self.rules: ByteRules | None = None
        self.decoder_fault: str | None = None
        try:
            self.rules = read_decoder(parts.decoder)
        except UnsupportedDecoder as fault:
            self.decoder_fault = f"{path}: {fault} cannot be done one token at a time"
        added = self._library.get_added_tokens_decoder()
        self._special = frozenset(i for i, token in added.items() if token.special)
        # These two grow to the size of the vocabulary at most.
        self._bytes: dict[int, bytes] = {}
        self._shown: dict[int, tuple[str, bytes]] = {}
        vocab: dict[str, int] = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size = len(vocab)
        self.num_token_ids = max(vocab.values(), default=-1) + 1
        self._vanishing = b""
        self.max_token_bytes = self._bytes_per_token(parts, added, vocab)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of ``text``; with the tokens the model wants around it, or without.

        Raises:
            InvalidRequest: the text holds half a surrogate pair, which stands for no character.
        """
        check_encodable(text)
        # The single-text call of the library keeps the interpreter locked all the time and
        # computes character offsets besides; this one does neither.
        [encoding] = self._library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def min_num_tokens(self, text: str, enough: int | None = None) -> int:
        """A cheap lower bound of ``len(encode(text))``: refuse hopeless texts by it.

        Counting stops once the bound is ``enough``, so that the cost for a very long text depends
        on what fits and not on what came: give the context length plus one.

        Bytes that the vocabulary lacks are not counted, since byte-level tokenizers drop them.
        0 where nothing is known: normalizers that delete or strip, pre-tokenizers that throw
        white space away, tokens that swallow the white space around them, and unknown characters
        merged into one token all make long texts into few tokens.
        """
        if self.max_token_bytes == math.inf:
            return 0
        num_bytes = 0
        for start in range(0, len(text), _CHUNK_CHARS):
            data = text[start : start + _CHUNK_CHARS].encode(errors="surrogatepass")
            num_bytes += len(data.translate(None, self._vanishing) if self._vanishing else data)
            if enough is not None and num_bytes > (enough - 1) * self.max_token_bytes:
                break
        return math.ceil(num_bytes / self.max_token_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes the token stands for inside a text; empty for ids without a token.

        Raises:
            ModelError: this tokenizer cannot be decoded token by token (``decoder_fault``).
        """
        try:
            return self._bytes[token_id]
        except KeyError:
            data = self._bytes[token_id] = self._token_bytes(token_id, first=False)
            return data

    def first_token_bytes(self, token_id: int) -> bytes:
        """As ``token_bytes``, for a token with no other before it."""
        return self._token_bytes(token_id, first=True)

    def token_content(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it (``Ġthe``, ``▁the``, ``<|im_end|>``), or None."""
        if token_id < 0:
            return None
        content: str | None = self._library.id_to_token(token_id)
        return content

    def shown(self, token_id: int) -> tuple[str, bytes]:
        """The token for people, and its bytes in an answer.

        Control tokens are shown by name and have no bytes in an answer. Bytes that are not whole
        characters are spelt out, so that different tokens stay different: ``bytes:\\xe6\\x97``.
        """
        try:
            return self._shown[token_id]
        except KeyError:
            if token_id in self._special:
                entry = (self.token_content(token_id) or "", b"")
            else:
                data = self.token_bytes(token_id)
                entry = (spell(data), data)
            self._shown[token_id] = entry
            return entry

    def spelt(self, token_id: int) -> tuple[str, bytes]:
        """As ``shown``, for answers in which control tokens are text."""
        if token_id not in self._special:
            return self.shown(token_id)
        data = self.token_bytes(token_id)
        return spell(data), data

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token, never shown in an answer."""
        return token_id in self._special

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The library's own decoding of a whole text at once."""
        text: str = self._library.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def _token_bytes(self, token_id: int, first: bool) -> bytes:
        if self.rules is None:
            raise ModelError(str(self.decoder_fault))
        content = self.token_content(token_id)
        return b"" if content is None else self.rules.to_bytes(content, first=first)

    def _bytes_per_token(
        self, parts: _File, added: Mapping[int, Any], vocab: Mapping[str, int]
    ) -> float:
        factor = shrink_factor(parts.normalizer)
        if factor is None or not keeps_all_text(parts.pre_tokenizer):
            return math.inf
        if any(token.lstrip or token.rstrip for token in added.values()):
            return math.inf
        byte_level = parts.model.type == "BPE" and (
            _mentions(parts.pre_tokenizer, "ByteLevel") or _mentions(parts.normalizer, "ByteLevel")
        )
        byte_fallback = parts.model.type in ("BPE", "Unigram") and parts.model.byte_fallback
        if not (byte_level or byte_fallback):
            return math.inf
        missing = bytes_without_token(vocab, byte_level=byte_level)
        if missing and (parts.normalizer is not None or not byte_level):
            return math.inf  # a whole character vanishes, or other bytes than those of the text
        self._vanishing = missing
        return factor * max(_num_bytes(content, byte_level) for content in vocab)


def spell(data: bytes) -> str:
    """Bytes as text; where they are not whole characters, as their numbers."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def check_encodable(text: str) -> None:
    """Raise InvalidRequest if ``text`` holds half a surrogate pair (JSON can bring one)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"the text holds half a surrogate pair at character {error.start}; "
            "send whole characters"
        ) from None


def _mentions(part: Mapping[str, Any] | None, type_name: str) -> bool:
    if part is None:
        return False
    inner = [*part.get("pretokenizers", []), *part.get("normalizers", [])]
    return part.get("type") == type_name or any(_mentions(one, type_name) for one in inner)


def _num_bytes(content: str, byte_level: bool) -> int:
    """The most bytes of text one token can stand for: too many rather than too few."""
    if byte_level and all(char in BYTE_ALPHABET for char in content):
        return len(content)
    return len(content.encode())
