"""What the steps of all workers of an engine were like."""

from __future__ import annotations

from trioserve.ipc.messages import StepStats
from trioserve.series import Histogram

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)


class StepTally:
    """Histograms of steps; written by the engine task, read by whoever shows them.

    Attributes:
        tokens: computed in a step, prefilled and sampled.
        seconds: a step took.
    """

    def __init__(self) -> None:
        self.tokens = Histogram(TOKENS)
        self.seconds = Histogram(SECONDS)
        self._total: int | None = None  # tokens the present worker has computed

    def add(self, stats: StepStats) -> None:
        """Count a step. What comes without one, as the answer to an abort, is passed over."""
        total, before = stats.prompt_tokens + stats.output_tokens, self._total
        self._total = total
        if not stats.step_s:
            return
        self.seconds.observe(stats.step_s)
        # What a worker computed before its first report was its self-test as well.
        if before is not None:
            self.tokens.observe(total - before)

    def begin_worker(self) -> None:
        """The totals of the next worker begin anew."""
        self._total = None
