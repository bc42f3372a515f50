"""From a token's written form in ``tokenizer.json`` to the bytes it stands for.

``tokenizer.json`` describes decoding as a chain of steps over the whole list of tokens. A server
needs it one token at a time, so the chain is read here once and turned into rules that hold for
each token alone, plus the one thing that does not: what is left out at the very start of a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from attrs import field, frozen

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies.

    Bytes that print stand for themselves, the others for the characters from U+0100 on.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printing)]
    return {chr(byte): byte for byte in printing} | {
        chr(0x100 + index): byte for index, byte in enumerate(hidden)
    }


BYTE_ALPHABET: Mapping[str, int] = _byte_alphabet()


class UnsupportedDecoder(Exception):
    """A decoding step that cannot be done one token at a time. Handled inside the text layer."""


@frozen(kw_only=True)
class ByteRules:
    """How tokens become bytes.

    ``strip`` is left out at the start of a text, ``strip_count`` times at most. ``first_drop`` is
    left out anywhere in the first token of a text. Both are empty for byte-level tokenizers, whose
    tokens mean the same everywhere.
    """

    steps: tuple[Callable[[str], str], ...] = field(default=(), repr=False)
    byte_level: bool = False
    byte_fallback: bool = False
    strip: bytes = b""
    strip_count: int = 0
    first_drop: str = ""

    @property
    def depends_on_start(self) -> bool:
        """Whether a token at the start of a text may stand for other bytes than elsewhere."""
        return bool(self.strip_count or self.first_drop)

    def to_bytes(self, content: str, *, first: bool = False) -> bytes:
        """The bytes of the token written ``content``; ``first``: nothing comes before it."""
        if first and self.first_drop:
            content = content.replace(self.first_drop, "")
        for step in self.steps:
            content = step(content)
        if self.byte_fallback and (match := _BYTE_TOKEN.fullmatch(content)):
            return bytes([int(match[1], 16)])
        if self.byte_level:
            try:
                return bytes([BYTE_ALPHABET[char] for char in content])
            except KeyError:  # an added token is written as it is, not in the alphabet
                pass
        return content.encode()


def read_decoder(decoder: Mapping[str, Any] | None) -> ByteRules:
    """Turn the ``decoder`` member of a tokenizer.json into rules.

    Raises:
        UnsupportedDecoder: saying which step, for example the one of WordPiece.
    """
    if decoder is None:  # the library then joins tokens with spaces
        return ByteRules(steps=(lambda content: " " + content,), strip=b" ", strip_count=1)
    is_sequence = decoder.get("type") == "Sequence"
    chain = decoder.get("decoders", []) if is_sequence else [decoder]
    fused = False
    steps: list[Callable[[str], str]] = []
    rules: dict[str, Any] = {}
    for step in chain:
        match step.get("type"):
            case "ByteLevel":
                rules["byte_level"] = fused = True
            case "ByteFallback":
                rules["byte_fallback"] = True
            case "Fuse":
                fused = True
            case "Replace":
                steps.append(_replace(step, fused))
            case "Metaspace":
                mark = step.get("replacement", "▁")
                steps.append(_replacer(mark, " "))
                if _metaspace_drops_first(step):
                    rules["first_drop"] = mark
            case "Strip":
                rules |= _strip(step, fused or len(chain) == 1)
            case other:
                raise UnsupportedDecoder(f"decoder step {other}")
    return ByteRules(steps=tuple(steps), **rules)


def _replacer(old: str, new: str) -> Callable[[str], str]:
    return lambda content: content.replace(old, new)


def _replace(step: Mapping[str, Any], fused: bool) -> Callable[[str], str]:
    old = step.get("pattern", {}).get("String")
    if old is None:
        raise UnsupportedDecoder("decoder step Replace with a regular expression")
    if fused and len(old) != 1:
        raise UnsupportedDecoder("decoder step Replace across tokens")
    return _replacer(old, step.get("content", ""))


def _metaspace_drops_first(step: Mapping[str, Any]) -> bool:
    if "prepend_scheme" in step:
        return bool(step["prepend_scheme"] != "never")
    return bool(step.get("add_prefix_space", True))


def _strip(step: Mapping[str, Any], fused: bool) -> dict[str, Any]:
    if step.get("stop", 0):
        raise UnsupportedDecoder("decoder step Strip at the end of a text")
    start = step.get("start", 0)
    if start and not fused:
        raise UnsupportedDecoder("decoder step Strip on every token")
    return {"strip": step.get("content", " ").encode(), "strip_count": start}


# --------------------------------------------------------------------- bytes per token, at most

_NORMAL_FORM_SHRINK = 4
"""No text loses more than three quarters of its bytes by NFC or NFD; the worst is two thirds:
three Hangul letters become one syllable, KELVIN SIGN becomes K."""


def shrink_factor(normalizer: Mapping[str, Any] | None) -> int | None:
    """How many times shorter, in UTF-8 bytes, a normalizer can make a text at most.

    None where there is no limit (it strips or deletes), or none that we know.
    """
    if normalizer is None:
        return 1
    match normalizer.get("type"):
        case "Sequence":
            factor = 1
            for part in normalizer.get("normalizers", []):
                part_factor = shrink_factor(part)
                if part_factor is None:
                    return None
                factor *= part_factor
            return factor
        case "Prepend" | "ByteLevel":
            return 1
        case "NFC" | "NFD":
            return _NORMAL_FORM_SHRINK
        case "Replace":
            old = normalizer.get("pattern", {}).get("String")
            new = normalizer.get("content", "")
            if old is None or not new:
                return None
            return max(1, -(-len(old.encode()) // len(new.encode())))
        case _:
            return None


def keeps_all_text(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    """Whether a pre-tokenizer is known to throw nothing away."""
    if pre_tokenizer is None:
        return True
    match pre_tokenizer.get("type"):
        case "Sequence":
            return all(keeps_all_text(part) for part in pre_tokenizer.get("pretokenizers", []))
        case "ByteLevel" | "Metaspace" | "Digits":
            return True
        case "Split" | "Punctuation":
            return bool(pre_tokenizer.get("behavior", "Isolated") != "Removed")
        case _:
            return False


def bytes_without_token(vocab: Mapping[str, int], *, byte_level: bool) -> bytes:
    """The bytes of UTF-8 texts that have no token of their own, so that they may vanish.

    Vocabularies do have such gaps: rare control characters, planes without assigned characters.
    """
    in_texts = [*range(0xC0), *range(0xC2, 0xF5)]
    if byte_level:
        written = {byte: char for char, byte in BYTE_ALPHABET.items()}
        return bytes(byte for byte in in_texts if written[byte] not in vocab)
    return bytes(byte for byte in in_texts if f"<0x{byte:02X}>" not in vocab)
