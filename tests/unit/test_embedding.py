"""What a program that embeds the engine gets, and what it does not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import trioserve

EMBEDDED = """
import json, signal, sys, threading
before = {s: signal.getsignal(s) for s in signal.valid_signals()}
import trio, trioserve

async def use():
    config = {
        "model": {"source": "random:llama?num_layers=1&hidden_size=32"},
        "device": {"kind": "simulated"},
    }
    async with trioserve.open_engine(config) as engine:
        changed = [s for s, handler in before.items() if signal.getsignal(s) is not handler]
        async with engine.generate("hello", trioserve.SamplingParams(max_tokens=4)) as stream:
            deltas = [delta async for delta in stream]
    return [int(s) for s in changed], stream.usage.completion_tokens

result = []
thread = threading.Thread(target=lambda: result.append(trio.run(use)))
thread.start()
thread.join()
changed, num_tokens = result[0]
json.dump({"changed": changed, "tokens": num_tokens, "modules": sorted(sys.modules)}, sys.stdout)
"""


def test_an_engine_in_a_thread_takes_no_signals_and_no_web_framework() -> None:
    result = subprocess.run(
        [sys.executable, "-c", EMBEDDED], capture_output=True, text=True, timeout=60, check=True
    )
    said = json.loads(result.stdout)
    assert said["changed"] == []
    assert said["tokens"] == 4
    modules = {name.split(".")[0] for name in said["modules"]}
    assert not modules & {"quart", "quart_trio", "hypercorn", "h11", "torch", "numpy", "click"}
    assert result.stderr == ""


def test_public_names_are_there_and_others_are_not() -> None:
    for name in trioserve.__all__:
        assert getattr(trioserve, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = trioserve.nope
    assert dir(trioserve) == sorted(trioserve.__all__)


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys; import trioserve; print(*(m for m in sys.modules if '.' in m))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "trioserve." not in result.stdout
