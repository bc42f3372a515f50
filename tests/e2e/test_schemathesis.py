"""What schemathesis makes of /openapi.json, a real server and the simulated device.

By hand, and longer: start a server, write CONFIG beside, and run ``schemathesis --config-file FILE
run http://127.0.0.1:8000/openapi.json --max-time 600``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from .server import running

# Rules between fields (stream_options needs stream) are told in words, and 1.0 is an integer to
# JSON Schema but not here: so a request may be refused that the document does not forbid. A request
# may ask for a deadline that cannot be met. Cases that begin from others' answers are the unit
# tests' part: those are not the same in every run. Cases come in the same order each time; how far
# a run gets depends on the machine.
CONFIG = """\
[checks.positive_data_acceptance]
enabled = false
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]
[phases.stateful]
enabled = false
"""


def test_api_10_schemathesis(tmp_path: Path) -> None:
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    model = {"source": "random:llama?num_layers=1&hidden_size=32", "max_model_len": 64}
    with running(tmp_path, model=model, device={"kind": "simulated"}) as server:
        found = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "--no-color"),
                *("--config-file", "schemathesis.toml", "run", f"{server.url}/openapi.json"),
                *("--seed", "1", "--max-time", "20", "--generation-database", "none"),
            ],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert found.returncode == 0, found.stdout[-10_000:] + found.stderr[-2000:]
        assert "Tested:" in found.stdout
        for line in server.log.splitlines():
            assert not any(word in line for word in ("ERROR", "Traceback")), line
