"""A load by ``locust``: whole and streamed chats, models and probes; no request may fail."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from checks import Table, Target, equal

PACKAGES = ("locust",)
USERS, SECONDS = 6, 8
LIMIT_S = 60.0
LOCUSTFILE = """
import os

from locust import HttpUser, between, task

CHAT = {
    "model": os.environ["MODEL"],
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 16,
}


class Talker(HttpUser):
    wait_time = between(0.01, 0.1)

    def on_start(self):
        self.client.headers["Authorization"] = "Bearer " + os.environ["KEY"]

    @task(3)
    def whole(self):
        self.client.post("/v1/chat/completions", json=CHAT)

    @task(3)
    def streamed(self):
        body = CHAT | {"stream": True}
        with self.client.post(
            "/v1/chat/completions", json=body, stream=True, name="streamed", catch_response=True
        ) as answer:
            lines = [line for line in answer.iter_lines() if line]
            if lines[-1:] != [b"data: [DONE]"]:
                answer.failure("the stream did not end with [DONE]")

    @task
    def refused(self):
        body = CHAT | {"temperature": -1}
        with self.client.post(
            "/v1/chat/completions", json=body, name="refused", catch_response=True
        ) as answer:
            if answer.status_code == 400:
                answer.success()

    @task
    def small(self):
        self.client.get("/v1/models")
        self.client.get("/health/ready")
"""


def run(target: Target, table: Table) -> None:
    with (
        table.check(f"{USERS} users for {SECONDS} s without a failure"),
        tempfile.TemporaryDirectory() as place,
    ):
        Path(place, "locustfile.py").write_text(LOCUSTFILE)
        command = [
            *(sys.executable, "-m", "locust", "--headless", "--host", target.url, "--csv", "out"),
            *("--users", str(USERS), "--spawn-rate", str(USERS), "--run-time", f"{SECONDS}s"),
            *("--stop-timeout", "20", "--only-summary"),
        ]
        done = subprocess.run(
            command,
            cwd=place,
            env=os.environ | {"MODEL": target.model, "KEY": target.key},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        with Path(place, "out_stats.csv").open() as file:
            rows = {row["Name"]: row for row in csv.DictReader(file)}
        equal(rows["Aggregated"]["Failure Count"], "0")
        assert int(rows["streamed"]["Request Count"]) > USERS
        assert int(rows["refused"]["Request Count"]) > 0
