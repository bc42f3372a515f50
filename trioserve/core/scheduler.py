"""What is computed in each step. Pure: no torch, no I/O, no clock.

**Step.** A step has a budget of ``max_num_batched_tokens``. Each running sequence that decodes
gets its one token first; prefill never displaces it, so a stream's gap is the time of one step
whatever arrives. What is left of the budget goes to prefill, in chunks.

**Two lanes.** Half of the prefill budget goes to the first come, half to the sequence with the
least left to compute; what one lane does not use goes to the other. With first come alone a
20-token prompt would wait for all long prompts before it; with shortest first alone, or equal
shares, a long prompt would starve or all of them crawl. With two lanes a short prompt waits for
no more than twice its own length and that of shorter ones, and the oldest always advances by half
the budget. Equal prompts are served first come in both. A lower ``priority`` value goes before
all others in both.

**Admission.** A waiting sequence is admitted when a lane has tokens for it, a slot is free, and
there are blocks for all its known tokens besides one more for each running sequence, which would
otherwise have to be preempted soon after. It takes these blocks at once, so prefill never
preempts. The lane of the shortest may pass a first-come head that has no room, but not more than
MAX_PASSES times, so that many small ones cannot keep a large one out. A sequence whose next
missing block is computed by a running one waits for it, out of the others' way: of n equal prompts
the first is computed, the others hit the prefix cache (``trioserve.core.prefixes``).

**Preemption.** A decoding sequence without a free block for its next token takes one from the
last admitted (policy "fcfs") or from the worst (priority, arrival) (policy "priority"), which is
recomputed later and waits in front of those that never ran. The oldest, or best, is never the
victim, so there is always progress; alone it always fits, as ``max_model_len`` fits the cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from trioserve.core.batch import NewSequence, SampledRow, ScheduledBatch, ScheduledRow
from trioserve.core.block_pool import BlockPool
from trioserve.core.prefixes import Prefixes, urgency
from trioserve.core.sequence import Sequence, SequenceStatus
from trioserve.core.waiting import Lane, WaitingQueue, lane_key
from trioserve.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from trioserve.ipc.messages import Delta, StepStats, TokenLogprobs, Work, WorkFailed

MAX_PASSES = 8
"""How many sequences may be admitted past a head that has no room."""
MAX_FOLLOWERS = 32
"""How many waiting sequences a step may set aside, since each costs a look at all its blocks."""
_MAX_TOKEN_ID = 2**31 - 1


class _PrefillPlan:
    """The prefill part of the step that is being made."""

    def __init__(self, prefills: list[Sequence], *, admit: bool) -> None:
        self.prefills = prefills  # running; grows by admission
        self.shares: dict[int, int] = {}  # tokens in this step
        self.open = set(Lane) if admit else set()  # lanes that may still admit
        self.blocked: Sequence | None = None  # the first-come head, if it has no room
        self.num_set_aside = 0

    def num_left(self, seq: Sequence) -> int:
        return seq.num_left - self.shares.get(seq.id, 0)


class Scheduler:
    """Owns all sequences and the block pool; only the step loop calls it.

    ``schedule`` and ``update`` alternate. A batch may still be in flight when sequences are
    aborted or failed, or when another is scheduled: sequences in flight are left out of later
    batches, and ``update`` passes over rows whose sequence has gone or moved on.

    Args:
        num_blocks: blocks of the KV cache, of ``block_size`` tokens each.
        max_num_seqs: most running sequences; ``max_num_batched_tokens`` limits them too, since
            each must be able to decode in each step.
        max_num_batched_tokens: token budget of a step.
        max_model_len: most tokens of a sequence, prompt and answer.
        eos_token_ids: end a sequence unless it says ``ignore_eos``.

    Raises:
        ConfigError: a sequence of ``max_model_len`` does not fit the cache.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: Literal["fcfs", "priority"] = "fcfs",
        prefix_caching: bool = True,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        num_needed = -(-max_model_len // block_size)
        if num_needed > num_blocks:
            raise ConfigError(
                f"max_model_len {max_model_len} does not fit the KV cache of "
                f"{num_blocks * block_size} tokens; lower it or raise [cache] memory"
            )
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_model_len = max_model_len
        self.policy = policy
        self.eos_token_ids = frozenset(eos_token_ids)
        self.pool = BlockPool(num_blocks, block_size, prefix_caching)
        self._prefixes = Prefixes(self.pool)
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: dict[int, Sequence] = {}  # in order of admission
        self._removed: list[int] = []  # to be forgotten by the executor with the next batch
        self._step = 0
        self._last_arrival = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._num_preemptions = 0
        self._prompt_tokens = 0
        self._output_tokens = 0

    # ------------------------------------------------------------------------ in and out

    def add(self, work: Work) -> None:
        """Queue a sequence. Its answer may be cut by ``max_model_len`` (reason "length").

        Raises:
            ContextLengthExceeded: the prompt leaves no room for an answer.
            InvalidRequest: an empty prompt, an impossible token id, an id that is in use.
        """
        prompt = work.prompt_token_ids
        if work.id in self._sequences:
            raise InvalidRequest(f"sequence {work.id} is running already")
        if not prompt:
            raise InvalidRequest("the prompt is empty; it needs at least one token", param="prompt")
        if len(prompt) >= self.max_model_len:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens, the context {self.max_model_len}; "
                f"at least one must be left for the answer",
                param="prompt",
            )
        if min(prompt) < 0 or max(prompt) > _MAX_TOKEN_ID:
            raise InvalidRequest(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}; "
                f"they lie between 0 and the vocabulary's size",
                param="prompt",
            )
        self._last_arrival += 1
        seq = Sequence(
            work,
            arrival=self._last_arrival,
            priority=work.priority if self.policy == "priority" else 0,
            max_model_len=self.max_model_len,
        )
        self._sequences[seq.id] = seq
        self._waiting.push(seq)

    def abort(self, ids: Iterable[int]) -> list[Delta]:
        """End sequences; a terminal delta for each that was still there. Frees their blocks."""
        deltas = []
        for seq in self._known(ids):
            self._end(seq, SequenceStatus.ABORTED)
            num_cached, seq.started = None if seq.started else seq.num_cached_tokens, True
            deltas.append(Delta(seq.id, [], "abort", num_cached_tokens=num_cached))
        return deltas

    def fail(self, ids: Iterable[int], message: str) -> list[WorkFailed]:
        """End sequences with an internal error; what they computed is not reused."""
        return [self._fail(seq, message) for seq in self._known(ids)]

    # ---------------------------------------------------------------------------- a step

    def schedule(self) -> ScheduledBatch | None:
        """The next step, or None if there is nothing to compute now.

        ``removed_ids`` wait for the next batch if there is none now.
        """
        grown, preempted = self._grow()
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for seq in self._running.values():
            if not seq.in_flight:
                (decodes if seq.num_left == 1 else prefills).append(seq)
        plan = _PrefillPlan(prefills, admit=not preempted)
        self._share(plan, self.max_num_batched_tokens - len(decodes))
        if not decodes and not plan.shares:
            return None
        self._step += 1
        new: list[NewSequence] = []
        rows = [self._row(seq, 1, grown.get(seq.id, ()), new) for seq in decodes]
        # A prompt with one token left after its hits is admitted as prefill but decodes in shape.
        chunks = [(self._sequences[id], num) for id, num in plan.shares.items()]
        chunks.sort(key=lambda chunk: chunk[0].num_left > 1)
        rows += [self._row(seq, num_tokens, (), new) for seq, num_tokens in chunks]
        removed, self._removed = self._removed, []
        return ScheduledBatch(step=self._step, removed_ids=removed, new=new, rows=rows)

    def update(
        self, batch: ScheduledBatch, sampled: Iterable[SampledRow]
    ) -> tuple[list[Delta], list[WorkFailed]]:
        """Take over the outcome of a batch: tokens, progress, ends.

        A sequence whose first step gives no token yet has a delta without one, so that the parent
        knows that it waits no more.

        ``sampled`` holds a result for each row with ``sample``; an ``error`` fails that sequence
        alone, and may be given for any row.
        """
        results = {row.id: row for row in sampled}
        deltas: list[Delta] = []
        failed: list[WorkFailed] = []
        for row in batch.rows:
            seq = self._sequences.get(row.id)
            if seq is None or seq.in_flight != batch.step:
                continue
            seq.in_flight = 0
            result = results.get(row.id)
            if result is not None and result.error is not None:
                failed.append(self._fail(seq, result.error, invalid=result.invalid))
                continue
            if row.sample and result is None:
                failed.append(self._fail(seq, f"step {batch.step} sampled no token for it"))
                continue
            if seq.prompt_logprobs is not None and (fault := _take_scores(seq, row, result)):
                failed.append(self._fail(seq, f"step {batch.step} {fault}"))
                continue
            seq.num_computed_tokens = row.start + row.num_tokens
            self._prompt_tokens += row.num_tokens - (row.start >= seq.num_prompt_tokens)
            if seq.num_computed_tokens >= (seq.num_registered + 1) * self.block_size:
                self._wait_again(self._prefixes.advance(seq))
            if row.sample and result is not None:
                deltas.append(self._append(seq, result))
            elif not seq.announced:
                deltas.append(Delta(id=seq.id, token_ids=[]))
            seq.announced = True
        return deltas, failed

    # ------------------------------------------------------------------------- questions

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._sequences)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences not admitted yet, or preempted."""
        return len(self._waiting)

    @property
    def num_sequences(self) -> int:
        """Sequences that have had no terminal answer yet."""
        return len(self._sequences)

    def stats(self, step_s: float) -> StepStats:
        """Counters now; ``step_s`` is passed through."""
        return StepStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks_used=self.pool.num_used,
            num_blocks=self.pool.num_blocks,
            prefix_queries=self._prefix_queries,
            prefix_hits=self._prefix_hits,
            num_preemptions=self._num_preemptions,
            prompt_tokens=self._prompt_tokens,
            output_tokens=self._output_tokens,
            step_s=step_s,
        )

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is found again, also by what running sequences add later."""
        self.pool.reset_prefix_cache()
        self._wait_again(self._prefixes.abandon(list(self._running.values())))

    def forget_unused(self) -> int:
        """Make the blocks that no sequence uses unfindable; how many others stay findable."""
        return self.pool.forget_unused()

    def check_integrity(self) -> None:
        """Check all invariants; costs O(blocks + sequences).

        Raises:
            RuntimeError: naming the invariant and the numbers.
        """
        self.pool.check_integrity([seq.block_ids for seq in self._sequences.values()])
        num_running, num_waiting = len(self._running), len(self._waiting)
        if num_running + num_waiting != len(self._sequences):
            raise RuntimeError(
                f"{len(self._sequences)} sequences, but {num_running} run and {num_waiting} wait"
            )
        if num_running > self.max_num_running:
            raise RuntimeError(f"{num_running} sequences run, at most {self.max_num_running} may")
        for seq in self._sequences.values():
            self._check_sequence(seq)
        self._prefixes.check(self._sequences, self._running)

    def _check_sequence(self, seq: Sequence) -> None:
        name = f"sequence {seq.id}"
        running = seq.id in self._running
        if running == (seq in self._waiting) or running != (seq.status is SequenceStatus.RUNNING):
            raise RuntimeError(f"{name} is {seq.status.name} and in the wrong set")
        if (seq.leader is not None) != self._waiting.is_parked(seq):
            raise RuntimeError(f"{name} is set aside for nobody, or follows and is not")
        room = len(seq.block_ids) * self.block_size
        if not running and (room or seq.num_computed_tokens or seq.sent):
            raise RuntimeError(f"{name} waits with {len(seq.block_ids)} blocks")
        if running and not 0 <= seq.num_computed_tokens < seq.num_tokens <= room + 1:
            raise RuntimeError(
                f"{name}: {seq.num_computed_tokens} of {seq.num_tokens} tokens computed, "
                f"room for {room}"
            )
        if seq.num_registered * self.block_size > seq.num_computed_tokens:
            raise RuntimeError(
                f"{name}: {seq.num_registered} blocks registered, "
                f"{seq.num_computed_tokens} tokens computed"
            )

    # ---------------------------------------------------------------- blocks for decoding

    def _grow(self) -> tuple[dict[int, list[int]], bool]:
        """Give each decoding sequence a block for its next token; whether any was preempted."""
        needy = [
            seq
            for seq in self._running.values()
            if len(seq.token_ids) > len(seq.block_ids) * self.block_size and not seq.in_flight
        ]
        grown: dict[int, list[int]] = {}
        preempted = False
        for seq in needy:
            while self.pool.num_free == 0 and seq.status is SequenceStatus.RUNNING:
                self._preempt(self._victim())
                preempted = True
            if seq.status is SequenceStatus.RUNNING:
                grown[seq.id] = self.pool.allocate(1)
                seq.block_ids += grown[seq.id]
        return grown, preempted

    def _victim(self) -> Sequence:
        if self.policy == "priority":
            return max(self._running.values(), key=lambda seq: (seq.priority, seq.arrival))
        return next(reversed(self._running.values()))

    def _preempt(self, seq: Sequence) -> None:
        self._num_preemptions += 1
        self._leave(seq, SequenceStatus.PREEMPTED)
        self._waiting.push(seq)

    # --------------------------------------------------------------------------- prefill

    def _share(self, plan: _PrefillPlan, budget: int) -> None:
        # Odd budgets alternate, so that with a budget of one both lanes are served in turns.
        num_shortest = (budget + (self._step & 1)) // 2
        left = self._hand_out(plan, Lane.FIRST_COME, budget - num_shortest)
        left = self._hand_out(plan, Lane.SHORTEST, num_shortest + left)
        self._hand_out(plan, Lane.FIRST_COME, left)

    def _hand_out(self, plan: _PrefillPlan, lane: Lane, budget: int) -> int:
        """Give ``budget`` tokens to the prefills of one lane, admitting on the way.

        Returns what nobody could use.
        """
        unserved = [seq for seq in plan.prefills if plan.num_left(seq) > 0]
        unserved.sort(key=lambda seq: urgency(lane, seq), reverse=True)
        while budget > 0:
            head = self._waiting.peek(lane) if lane in plan.open else None
            if head is not None and (
                not unserved or lane_key(lane, head) < urgency(lane, unserved[-1])
            ):
                if not self._admit(head, plan, lane):
                    continue  # it closed the lane, or set this head aside
                seq = head
            elif unserved:
                seq = unserved.pop()
            else:
                break
            num_tokens = min(plan.num_left(seq), budget)
            plan.shares[seq.id] = plan.shares.get(seq.id, 0) + num_tokens
            budget -= num_tokens
        return budget

    def _admit(self, seq: Sequence, plan: _PrefillPlan, lane: Lane) -> bool:
        if len(self._running) >= self.max_num_running:
            plan.open.clear()
            return False
        passed = plan.blocked
        if passed is not None and passed is not seq and passed.num_passes >= MAX_PASSES:
            plan.open.clear()
            return False
        hits = self._prefixes.find(seq)
        if found := self._prefixes.leader(seq, len(hits)):
            self._waiting.park(seq)
            self._prefixes.follow(seq, *found)
            plan.num_set_aside += 1
            if plan.num_set_aside >= MAX_FOLLOWERS:
                plan.open.clear()
            return False
        num_new = -(-seq.num_tokens // self.block_size) - len(hits)
        reserve = len(self._running)
        if num_new + self.pool.count_free(hits) + reserve > self.pool.num_free:
            plan.open.discard(lane)
            if lane is Lane.FIRST_COME:
                plan.blocked = seq
            return False
        if passed is not None:
            passed.num_passes += 1
        self._waiting.remove(seq)
        self.pool.acquire(hits)
        self._enter(seq, hits + self.pool.allocate(num_new), len(hits))
        plan.prefills.append(seq)
        return True

    def _enter(self, seq: Sequence, block_ids: list[int], num_hits: int) -> None:
        seq.status = SequenceStatus.RUNNING
        seq.block_ids = block_ids
        seq.num_registered = num_hits
        seq.num_computed_tokens = num_hits * self.block_size
        seq.num_passes = 0
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            self._prefix_hits += seq.num_computed_tokens
            if self.pool.prefix_caching and seq.prompt_logprobs is None:
                self._prefix_queries += seq.num_tokens
        self._running[seq.id] = seq
        self._prefixes.begin(seq, num_hits)

    def _wait_again(self, followers: list[Sequence]) -> None:
        for seq in followers:
            self._waiting.push(seq)

    # -------------------------------------------------------------------------- progress

    def _row(
        self, seq: Sequence, num_tokens: int, grown: Iterable[int], new: list[NewSequence]
    ) -> ScheduledRow:
        if not seq.sent:
            new.append(
                NewSequence(
                    id=seq.id,
                    token_ids=list(seq.token_ids),
                    num_prompt_tokens=seq.num_prompt_tokens,
                    num_computed_tokens=seq.num_computed_tokens,
                    block_ids=list(seq.block_ids),
                    sampling=seq.sampling,
                    seed=seq.seed,
                    bad_words_ids=seq.bad_words_ids,
                    prompt_logprobs=seq.prompt_logprobs,
                )
            )
            grown = ()
            seq.sent = True
        seq.in_flight = self._step
        sample = num_tokens == seq.num_left
        return ScheduledRow(seq.id, seq.num_computed_tokens, num_tokens, list(grown), sample)

    def _append(self, seq: Sequence, result: SampledRow) -> Delta:
        token_id = result.token_id
        seq.token_ids.append(token_id)
        self._output_tokens += 1
        scores: list[TokenLogprobs | None] | None = None
        if seq.prompt_logprobs is not None:
            scores = [None, *seq.prompt_entries]
            seq.prompt_logprobs, seq.prompt_entries = None, []
        finish_reason = self._finish_reason(seq, token_id)
        if finish_reason is not None:
            self._end(seq, SequenceStatus.FINISHED)
        num_cached, seq.started = None if seq.started else seq.num_cached_tokens, True
        is_stop_token = finish_reason == "stop" and not self._is_end(seq, token_id)
        return Delta(
            seq.id,
            [token_id],
            finish_reason,
            token_id if is_stop_token else None,
            None if result.logprobs is None else [result.logprobs],
            num_cached,
            scores,
        )

    def _finish_reason(self, seq: Sequence, token_id: int) -> str | None:
        """Why the sequence ends with its last token, if it does."""
        num_tokens = len(seq.token_ids)
        if num_tokens - seq.num_prompt_tokens >= seq.sampling.min_tokens and (
            self._is_end(seq, token_id) or token_id in seq.stop_token_ids
        ):
            return "stop"
        return "length" if num_tokens >= seq.max_num_tokens else None

    def _is_end(self, seq: Sequence, token_id: int) -> bool:
        return token_id in self.eos_token_ids and not seq.sampling.ignore_eos

    # -------------------------------------------------------------------------- the end

    def _known(self, ids: Iterable[int]) -> list[Sequence]:
        return [self._sequences[id] for id in dict.fromkeys(ids) if id in self._sequences]

    def _fail(self, seq: Sequence, message: str, *, invalid: bool = False) -> WorkFailed:
        if not invalid:
            # The fault may lie in any block it has read, also in hits: none may be found again.
            for block_id in seq.block_ids:
                self.pool.forget(block_id)
        self._end(seq, SequenceStatus.FAILED)
        return WorkFailed(id=seq.id, code="invalid" if invalid else "internal", message=message)

    def _end(self, seq: Sequence, status: SequenceStatus) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self._leave(seq, status)
        else:
            self._prefixes.unfollow(seq)
            self._waiting.remove(seq)
            seq.status = status
        del self._sequences[seq.id]

    def _leave(self, seq: Sequence, status: SequenceStatus) -> None:
        """Stop running: give back the blocks, and have the executor forget it."""
        del self._running[seq.id]
        if seq.sent:
            self._removed.append(seq.id)
        self._wait_again(self._prefixes.end(seq))
        self.pool.release(seq.block_ids)
        seq.clear_progress()
        seq.status = status


def _take_scores(seq: Sequence, row: ScheduledRow, result: SampledRow | None) -> str:
    """Keep what a row says about the prompt's tokens; the fault where that is not all."""
    scores = (result.prompt_logprobs if result is not None else None) or []
    end = min(row.start + row.num_tokens, seq.num_prompt_tokens - 1)
    if len(scores) != max(0, end - row.start):
        return f"scored {len(scores)} of {end - row.start} prompt tokens"
    seq.prompt_entries += scores
    return ""
