"""The child of ``trioserve.models.hub``: one snapshot download, then gone.

Reads a request as one JSON line on stdin, which is its lifeline then, and writes JSON lines on
stdout: ``{"num_bytes", "total_bytes"}``
while it downloads, then ``{"path"}`` or ``{"error"}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from typing import Any

from trioserve.models.lifeline import die_with_parent

# Weights as safetensors, and text. Never a pickle, never Python.
PATTERNS = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja")
# Other forms of the same weights, and what is not at the top.
IGNORED = ("*/*", "consolidated*.safetensors")
REPORT_EVERY_S = 0.2


def main() -> int:
    """Exit status 0 with a path, 1 with an error."""
    request = json.loads(sys.stdin.readline())
    die_with_parent()
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        path = download(request["repository"], request["revision"], request["token"])
    except Exception as error:  # whatever the library or the network raises is the outcome
        say(error=explain(error, bool(request["token"])))
        return 1
    say(path=path)
    return 0


def download(repository: str, revision: str | None, token: str | None) -> str:
    """The snapshot's directory. A full commit hash that is in the hub's cache needs no network."""
    from huggingface_hub import snapshot_download

    keywords: dict[str, Any] = {
        "revision": revision,
        "token": token,
        "allow_patterns": list(PATTERNS),
        "ignore_patterns": list(IGNORED),
        "tqdm_class": progress_bar(),
    }
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        # Whatever this raises means only that the hub has to be asked.
        with contextlib.suppress(Exception):
            path = snapshot_download(repository, local_files_only=True, **keywords)
            if is_complete(path):
                return path
    return snapshot_download(repository, **keywords)


def is_complete(path: str) -> bool:
    """Whether a snapshot has all its weights; one that was interrupted lies there in part."""
    index = os.path.join(path, "model.safetensors.index.json")
    if not os.path.exists(index):
        return any(name.endswith(".safetensors") for name in os.listdir(path))
    with open(index, encoding="utf-8") as file:
        shards = set(json.load(file)["weight_map"].values())
    return shards <= set(os.listdir(path))


def progress_bar() -> type:
    """A tqdm that draws nothing and reports bytes."""
    from tqdm import tqdm

    class Reporter(tqdm):
        _last = 0.0

        def __init__(self, *args: Any, **keywords: Any) -> None:
            keywords.pop("name", None)  # the hub's own bars take one
            keywords["file"] = open(os.devnull, "w")  # noqa: SIM115  (lives as long as the bar)
            super().__init__(*args, **keywords)

        def update(self, n: float | None = 1) -> bool | None:
            drawn = super().update(n)
            now = time.monotonic()
            if self.unit == "B" and now - Reporter._last >= REPORT_EVERY_S:
                Reporter._last = now
                say(num_bytes=int(self.n), total_bytes=int(self.total or 0))
            return drawn

    return Reporter


_output = threading.Lock()


def say(**answer: object) -> None:
    """One JSON line on stdout; downloads run on several threads."""
    with _output:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def explain(error: Exception, has_token: bool) -> str:
    """One line for what went wrong, by the class the library raises."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "GatedRepoError" in kinds:
        return "the repository is gated: accept its terms on the hub and set model.hf_token"
    if "RepositoryNotFoundError" in kinds:
        token = "the token may not see it" if has_token else "or private: set model.hf_token"
        return f"no such repository, {token}"
    if "RevisionNotFoundError" in kinds:
        return "no such revision in this repository"
    if "OfflineModeIsEnabled" in kinds or os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return "offline mode is on (HF_HUB_OFFLINE) and the hub's cache has no such snapshot"
    if "LocalEntryNotFoundError" in kinds or "ConnectError" in kinds:
        return "the hub cannot be reached and its cache has no such snapshot"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


if __name__ == "__main__":
    sys.exit(main())
