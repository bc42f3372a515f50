"""An engine whose answers pass through the real detokenizer and stop strings, a byte a token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trioserve.ipc.messages import Delta, TokenLogprobs
from trioserve.text.stream import TextStream
from trioserve.text.token_bytes import BYTE_ALPHABET
from trioserve.text.tokenizer import Tokenizer

from .fake_engine import FakeEngine, FakeStream


def byte_tokenizer(folder: Path) -> Tokenizer:
    """A byte-level tokenizer without merges: token ids are bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    vocab = dict(BYTE_ALPHABET)
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    path = folder / "tokenizer.json"
    path.write_text(library.to_str())
    return Tokenizer(str(path))


class TextEngine(FakeEngine):
    """Answers every request with the same bytes.

    Args:
        data: the answer; it may end inside a character.
        sizes: tokens in each delta, over and over.
    """

    def __init__(self, tokenizer: Tokenizer, data: bytes, sizes: Sequence[int] = (1,)) -> None:
        super().__init__(script=self._answer)
        self.tokenizer = tokenizer
        self.data = data
        self.sizes = sizes

    def _answer(self, stream: FakeStream) -> None:
        text = TextStream(self.tokenizer, stream.prompt_token_ids, stream.sampling)
        data = self.data[: stream.sampling.max_tokens]
        start = turn = 0
        while not text.finished:
            end = start + self.sizes[turn % len(self.sizes)]
            ids, start, turn = list(data[start:end]), end, turn + 1
            reason = "length" if end >= len(data) else None
            shown = text.push(Delta(stream.id, ids, reason, None, [_logprobs(id) for id in ids]))
            if shown is not None:
                stream.push(shown)


def _logprobs(token_id: int) -> TokenLogprobs:
    """The chosen one is second best, the best is its neighbour."""
    return TokenLogprobs(token_id, -1.5, 2, [(token_id ^ 1, -0.5), (token_id, -1.5)])
