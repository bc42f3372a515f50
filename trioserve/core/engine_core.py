"""The worker's loop: take commands, schedule, execute, sample, emit.

Everything here runs in the worker's main thread; only the inbox has a thread of its own. A step is
three calls, so the device never waits for HTTP.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import time

from trioserve.config.schema import Config
from trioserve.core.batch import Executor, SampledRow, ScheduledBatch
from trioserve.core.kv_cache import plan_kv_cache
from trioserve.core.scheduler import Scheduler
from trioserve.core.stages import StageReporter
from trioserve.devices.memory import give_memory_back
from trioserve.errors import RequestError, StartupError
from trioserve.ipc.child import Channel
from trioserve.ipc.messages import (
    Abort,
    Check,
    Checked,
    Command,
    Control,
    Controlled,
    Delta,
    Exit,
    Ready,
    ReadyInfo,
    StepOutput,
    Work,
    WorkFailed,
)
from trioserve.ipc.status_page import PAUSED, rss_bytes
from trioserve.models.spec import ResolvedModel
from trioserve.sampling_params import SamplingParams

logger = logging.getLogger("trioserve.core")

SELF_TEST_ID = -1
SELF_TEST_TOKENS = 4


class EngineCore:
    """Scheduler and executor behind a channel.

    Owns the Scheduler; the executor owns tensors. ``start`` runs the stages up to Ready, ``run``
    serves until the parent closes the command pipe.
    """

    def __init__(
        self,
        config: Config,
        model: ResolvedModel,
        executor: Executor,
        channel: Channel,
        report: StageReporter,
    ) -> None:
        self._config = config
        self._model = model
        self._executor = executor
        self._channel = channel
        self._report = report
        self._step = 0
        self._paused = False
        self._scheduler: Scheduler

    # ------------------------------------------------------------------------- start-up

    def start(self) -> None:
        """Load, size, warm up and test; ends with Ready. Raises what the failing stage raised."""
        report, executor = self._report, self._executor
        executor.load(report)
        profile = executor.profile(report)
        with report.stage("kv-cache") as stage:
            plan = plan_kv_cache(
                profile,
                bytes_per_token=executor.kv_bytes_per_token,
                config=self._config,
                model_max_len=self._model.spec.max_position,
            )
            executor.init_kv_cache(plan.num_blocks, plan.max_model_len)
            stage.num_bytes = plan.kv_bytes
            stage.detail = f"{plan.num_blocks * self._config.cache.block_size} tokens"
        self._scheduler = Scheduler(
            num_blocks=plan.num_blocks,
            block_size=self._config.cache.block_size,
            max_num_seqs=self._config.scheduler.max_num_seqs,
            max_num_batched_tokens=self._config.scheduler.max_num_batched_tokens,
            max_model_len=plan.max_model_len,
            policy=self._config.scheduler.policy,
            prefix_caching=self._config.cache.prefix_caching,
            eos_token_ids=self._model.spec.eos_token_ids,
        )
        executor.warm_up(report)
        with report.stage("self-test"):
            self._self_test(plan.max_model_len)
        with report.stage("ready"):
            # What start-up made lives as long as the process: the collector need not walk it.
            gc.collect()
            gc.freeze()
            gc.enable()  # the worker's main has stopped it
            give_memory_back()
        self._channel.send(
            Ready(
                ReadyInfo(
                    **executor.info(),
                    num_parameters=executor.num_parameters,
                    weight_bytes=executor.weight_bytes,
                    max_model_len=plan.max_model_len,
                    vocab_size=executor.vocab_size,
                    block_size=self._config.cache.block_size,
                    num_blocks=plan.num_blocks,
                    kv_cache_bytes=plan.kv_bytes,
                    rss_bytes=rss_bytes(os.getpid()) or 0,
                )
            )
        )

    def _self_test(self, max_model_len: int) -> None:
        """Produce real tokens through the real path; a non-finite logit or a fault ends it here."""
        vocab_size = self._model.spec.vocab_size
        length = max(1, min(8, max_model_len - SELF_TEST_TOKENS))
        bos = self._model.spec.bos_token_id
        prompt = [(bos or 0) if i == 0 else (i * 7919) % vocab_size for i in range(length)]
        num_tokens = max(1, min(SELF_TEST_TOKENS, max_model_len - length))
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        self._scheduler.add(Work(SELF_TEST_ID, prompt, sampling, seed=0))
        tokens: list[int] = []
        while self._scheduler.has_work:
            deltas, failed = self._run_step()
            if failed:
                raise StartupError("self-test", failed[0].message)
            for delta in deltas:
                tokens.extend(delta.token_ids)
        if len(tokens) != num_tokens:
            raise StartupError("self-test", f"{len(tokens)} tokens came, {num_tokens} were due")
        self._scheduler.reset_prefix_cache()

    # ---------------------------------------------------------------------------- serving

    def run(self) -> None:
        """Serve until the command pipe ends or Exit comes."""
        inbox, status = self._channel.inbox, self._channel.status
        while True:
            if self._paused or not self._scheduler.has_work:
                if self._paused:
                    status.begin(PAUSED, math.inf, self._step)
                else:
                    status.end()
                command = inbox.get()
                if command is not None and not self._handle(command):
                    return
            for command in inbox.drain():
                if not self._handle(command):
                    return
            if self._paused:
                self._emit([], [], 0.0)  # no step tells how many wait by now
            elif self._scheduler.has_work:
                started = time.monotonic()
                deltas, failed = self._run_step()
                self._emit(deltas, failed, time.monotonic() - started)

    def _handle(self, command: Command) -> bool:
        """Act on one command; False when it is time to leave."""
        match command:
            case Work():
                self._add(command)
            case Abort(ids=ids):
                if deltas := self._scheduler.abort(ids):
                    self._emit(deltas, [], 0.0)
            case Control():
                self._channel.send(self._control(command))
            case Check(token=token):
                self._channel.send(self._checked(token))
            case Exit():
                return False
            case _:
                raise RuntimeError(f"unexpected command {type(command).__name__}")
        return True

    def _control(self, command: Control) -> Controlled:
        """Between two steps: nothing is in flight."""
        match command.action:
            case "pause":
                self._paused = True
            case "resume":
                self._paused = False
            case "reset_prefix_cache":
                if num_used := self._scheduler.forget_unused():
                    detail = f"{num_used} cached blocks are in use and kept"
                    return Controlled(command.token, False, detail)
            case action:
                return Controlled(command.token, False, f"unknown action {action}")
        return Controlled(command.token, True)

    def _add(self, work: Work) -> None:
        try:
            self._scheduler.add(work)
        except RequestError as error:
            self._channel.send(WorkFailed(work.id, "invalid", error.message))
        except Exception as error:
            logger.exception("sequence %d could not be admitted", work.id)
            self._scheduler.fail([work.id], "")  # where it got in half-way
            self._channel.send(WorkFailed(work.id, "internal", f"{type(error).__name__}: {error}"))

    def _run_step(self) -> tuple[list[Delta], list[WorkFailed]]:
        """Schedule, execute, sample: one step."""
        batch = self._scheduler.schedule()
        if batch is None:
            # Steps are synchronous and every admitted sequence fits: going on would spin for ever.
            raise RuntimeError("the scheduler has work but no step for it")
        self._step = batch.step
        self._channel.status.begin("step", self._config.watchdog.step_budget_s, batch.step)
        try:
            sampled = self._executor.sample(self._executor.execute(batch))
        except Exception:
            logger.exception("step %d failed; its rows are tried one by one", batch.step)
            sampled, failed = self._isolate(batch)
            deltas, more = self._scheduler.update(batch, sampled)
            return deltas, failed + more
        return self._scheduler.update(batch, sampled)

    def _isolate(self, batch: ScheduledBatch) -> tuple[list[SampledRow], list[WorkFailed]]:
        """Compute each row of a failed step alone, so that only the row at fault pays.

        A row may be computed twice: it writes the same keys and values to the same slots.
        """
        sampled: list[SampledRow] = []
        failed: list[WorkFailed] = []
        entering = {new.id: new for new in batch.new}
        removed_ids = batch.removed_ids
        for row in batch.rows:
            new = [entering[row.id]] if row.id in entering else []
            alone = ScheduledBatch(batch.step, removed_ids, new, [row])
            removed_ids = []
            try:
                sampled += self._executor.sample(self._executor.execute(alone))
            except Exception as error:
                logger.exception("sequence %d failed in step %d", row.id, batch.step)
                failed += self._scheduler.fail([row.id], f"{type(error).__name__}: {error}")
        return sampled, failed

    def _emit(self, deltas: list[Delta], failed: list[WorkFailed], step_s: float) -> None:
        for failure in failed:
            self._channel.send(failure)
        self._channel.send(StepOutput(self._step, deltas, self._scheduler.stats(step_s)))

    def _checked(self, token: int) -> Checked:
        fault = ""
        try:
            self._scheduler.check_integrity()
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        scheduler = self._scheduler
        return Checked(
            token, scheduler.stats(0.0), scheduler.num_running + scheduler.num_waiting, fault
        )
