"""Loads by ``guidellm run``, streamed; its report must count no error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks import Table, Target, equal

PACKAGES = ("guidellm",)
REQUESTS, STREAMS, TOKENS = 24, 4, 16
LIMIT_S = 150.0


def run(target: Target, table: Table) -> None:
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        with table.check(f"{STREAMS} streams of {route}"), tempfile.TemporaryDirectory() as place:
            report = load(target, route, Path(place))
            counts = report["benchmarks"][0]["metrics"]["request_totals"]
            equal((counts["successful"], counts["errored"]), (REQUESTS, 0))
            shown = report["benchmarks"][0]["requests"]["successful"]
            equal({request["output_metrics"]["text_tokens"] for request in shown}, {TOKENS})


def load(target: Target, route: str, place: Path) -> dict[str, Any]:
    """Runs it in ``place`` and returns its report."""
    asked = [
        json.dumps({"prompt": f"Tell me about number {i}.", "output_tokens_count": TOKENS})
        for i in range(REQUESTS)
    ]
    (place / "prompts.jsonl").write_text("\n".join(asked))
    backend = {
        "kind": "openai_http",
        "target": target.url,
        "model": target.model,
        "request_format": route,
        "api_key": target.key,
    }
    command = [
        *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
        *("--backend", json.dumps(backend)),
        *("--profile", f"kind=concurrent,streams={STREAMS}"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--data", f"kind=json_file,path={place / 'prompts.jsonl'}"),
        *("--output", f"kind=json,path={place / 'report.json'}"),
    ]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(place)}
    done = subprocess.run(
        command, cwd=place, env=env, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return dict(json.loads((place / "report.json").read_text()))
