"""The ``llm`` command line, its models told in ``extra-openai-models.yaml``."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import TIMEOUT_S, Table, Target, equal

PACKAGES = ("llm",)
MODELS = """\
- model_id: ours
  model_name: {model}
  api_base: "{v1}"
  api_key_name: trioserve
- model_id: ours-text
  model_name: {model}
  api_base: "{v1}"
  api_key_name: trioserve
  completion: true
"""


def run(target: Target, table: Table) -> None:
    with tempfile.TemporaryDirectory() as home:
        models = MODELS.format(model=target.model, v1=target.v1)
        Path(home, "extra-openai-models.yaml").write_text(models)

        def llm(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [sys.executable, "-m", "llm", *words],
                env=os.environ | {"LLM_USER_PATH": home},
                input=text,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )

        def answer(*words: str, text: str = "") -> str:
            done = llm(*words, text=text)
            assert done.returncode == 0, done.stderr
            return done.stdout

        with table.check("keys set, models list"):
            answer("keys", "set", "trioserve", "--value", target.key)
            assert "ours" in answer("models", "list")
        brief = ("-o", "max_tokens", "12", "-o", "seed", "1")
        with table.check("prompt, streamed and with --no-stream"):
            streamed = answer("-m", "ours", *brief, "Hello")
            assert streamed.strip()
            equal(answer("-m", "ours", "--no-stream", *brief, "Hello"), streamed)
        with table.check("--usage, -s, standard input"):
            done = llm("-m", "ours", "-s", "Be brief.", "-u", *brief, text="Hello")
            assert "input" in done.stderr, done.stderr
            assert "output" in done.stderr, done.stderr
        with table.check("-c goes on with the conversation"):
            answer("-m", "ours", "-c", *brief, "And you?")
        with table.check("completion: true"):
            assert answer("-m", "ours-text", *brief, "Once upon").strip()
        with table.check("a wrong key and a wrong value are told in one line"):
            done = llm("-m", "ours", "--key", "wrong", "Hello")
            assert done.returncode == 1
            assert "API key" in done.stderr, done.stderr
            done = llm("-m", "ours", "-o", "max_tokens", "-3", "Hello")
            assert done.returncode == 1
            assert "max_tokens" in done.stderr, done.stderr
