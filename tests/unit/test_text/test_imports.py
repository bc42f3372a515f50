"""The text layer runs in the parent: nothing heavy, and nothing at all before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trioserve.text.tokenizer import Tokenizer

MODULES = "tokenizer, detokenizer, stop_strings, stream, chat_template, messages, token_bytes"
NEVER = ("torch", "numpy", "transformers")
LATE = ("tokenizers", "jinja2")


def loaded_after(program: str, *args: str) -> set[str]:
    program += "\nimport sys; print(*sys.modules, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", program, *args], check=True, capture_output=True, text=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("module", MODULES.split(", "))
def test_each_module_imports_alone_and_light(module: str) -> None:
    loaded = loaded_after(f"import trioserve.text.{module}")
    assert f"trioserve.text.{module}" in loaded
    assert not loaded.intersection(NEVER + LATE)


def test_use_brings_in_what_it_needs_only(byte_level: Tokenizer) -> None:
    program = """
import sys
from trioserve.text.chat_template import ChatTemplate
from trioserve.text.tokenizer import Tokenizer
tokenizer = Tokenizer(sys.argv[1])
text = ChatTemplate("{{ messages[0].content | tojson }}").render([{"role": "user", "content": "x"}])
assert tokenizer.decode(tokenizer.encode(text)) == '"x"'
"""
    loaded = loaded_after(program, byte_level.path)
    assert loaded.issuperset(LATE)
    assert not loaded.intersection(NEVER)
