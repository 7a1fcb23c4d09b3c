"""The engine's loop: admits, prefills a chunk, runs a round, hands out what was emitted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

import torch

from ..graphs import (
    CaptureReport,
    DecodeState,
    Executor,
    HostExecutor,
    HostReader,
    Mailbox,
    Program,
    bucket_for,
    upload,
)
from ..graphs.buckets import chunk_width
from ..graphs.state import FINISH_ERROR
from ..profiling.floor import RoundShape, StepCost
from ..profiling.observer import Observer, Observers
from .adaptive import Budget
from .interrupts import deferred_interrupt
from .outputs import FinishReason
from .request import Phase, Request
from .results import finish_name, finish_request, record_tokens
from .rounds import LogprobBuffers, RoundBuilder
from .scheduler import Scheduler
from .slots import SlotPool
from .speculators import BaseSpeculator


@dataclass(frozen=True, kw_only=True)
class CorePlan:
    """The shapes an engine runs at, fixed when it is created."""

    buckets: tuple[int, ...]
    """Ascending; under `exact=True` one only."""
    widths: dict[int, tuple[int, ...]]
    """Verify widths of each bucket, ascending."""
    prefill_widths: tuple[int, ...]
    metrics: str
    """none, summary or detailed."""
    max_logprobs: int
    reuse_generated: bool
    """Whether the KV of generated tokens may serve a later prompt; not under `exact=True`, where a prompt's KV must
    come from prefill chunks alone."""
    budget_rule: str | None = None
    """What the budget of adaptive verification is decided from, for metrics; None without it."""
    rounds_per_launch: int = 2**30
    """The most rounds of a loop before it returns to the host by itself; by default as good as no limit."""

    def __post_init__(self) -> None:
        if not 1 <= self.rounds_per_launch < 2**31:
            raise ValueError(f"rounds_per_launch must be from 1 to {2**31 - 1}, got {self.rounds_per_launch}")


@dataclass(frozen=True, eq=False)
class _Loop:
    """The decoding loop under way: an executor's iterator over the program of a bucket, for all decoding requests.

    Until it has ended or been closed the device may be running it, and then the host touches nothing of the state but
    `DecodeState.host`.
    """

    rounds: Generator[None, None, None]
    bucket: int


_ENDED = object()


class EngineCore:
    """Drives the programs for any number of requests; `step` does one chunk and one round at most."""

    def __init__(
        self,
        state: DecodeState,
        builder: RoundBuilder,
        speculator: BaseSpeculator | None,
        executor: Executor,
        slots: SlotPool,
        plan: CorePlan,
    ) -> None:
        self.state, self.plan = state, plan
        self._builder, self._speculator, self._executor = builder, speculator, executor
        self._scheduler = Scheduler(slots)
        self._mailbox, self._reader = Mailbox(state), HostReader(state.device)
        self._programs: dict[tuple[str, int, bool], Program] = {}
        self._logprobs: LogprobBuffers | None = None
        self._loop: _Loop | None = None
        self._own_executor = executor
        self._observers: list[tuple[Observer, bool]] = []
        self._observer = Observer()
        self._ended: list[int] = []
        """Slots of requests that the host ended, which the device may not know yet."""
        self._unclean: list[int] = []
        """Slots whose KV must be cleared before another request gets them."""

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.busy

    def submit(self, request: Request) -> None:
        """Queues a request; it starts when a slot is free."""
        self._scheduler.submit(request)

    def cancel(self, request: Request) -> None:
        """Ends a request with reason `cancelled`; its tokens so far are kept, and the others go on."""
        if request.phase is Phase.DECODE:
            self._deliver(request, time.perf_counter())
        if request.result is None:
            self._finish(request, "cancelled")
        if not self._scheduler.decoding:
            self._leave_loop()

    def step(self) -> None:
        """Advances every request: admissions, one prefill chunk, one round, and delivery of what came out."""
        with deferred_interrupt():
            if self._scheduler.wants_control:
                self._leave_loop()
                for request in self._scheduler.admit():
                    self._load(request)
                self._prefill_chunk()
                for request in self._scheduler.ready():
                    self._start(request)
            if self._scheduler.decoding:
                self._round()
            if not self._scheduler.decoding:
                self._leave_loop()

    def abort(self, error: str | None) -> None:
        """Ends every unfinished request and frees every slot: as failed with a message, or else as cancelled."""
        if error is None:
            self._leave_loop()
        else:
            # What broke may break this too, and every request must learn of the first error.
            with contextlib.suppress(Exception):
                self._stop_loop()
        for request in self._scheduler.unfinished():
            self._finish(request, "cancelled" if error is None else "error", error=error)

    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compiles and captures every program; requests under way are not disturbed."""
        self._leave_loop()
        programs = list(self.programs())
        done, total = 0, sum(1 for program in programs for _ in program.steps())
        for program in programs:

            def tell(step: str, program: str = program.name) -> None:
                nonlocal done
                if progress is not None:
                    progress(done, total, f"{program} {step}")
                done += 1

            self._own_executor.prepare(program, tell)
        if progress is not None:
            progress(total, total, "done")

    @property
    def capture_report(self) -> CaptureReport:
        """Which graphs were captured so far."""
        return self._own_executor.report

    def propose_cost(self, shape: RoundShape) -> StepCost | None:
        """The least that drafting costs in a round; None for plain decoding."""
        return None if self._speculator is None else self._speculator.propose_cost(shape)

    def pause(self) -> None:
        """Leaves the loop of rounds, so that the host may read and write the device; the next step enters it again."""
        self._leave_loop()

    @property
    def budget(self) -> Budget:
        """What decides how many drafts a round makes and verifies."""
        return self._builder.budget

    @property
    def speculator(self) -> BaseSpeculator | None:
        """What drafts."""
        return self._speculator

    @property
    def own_executor(self) -> Executor:
        """What runs the programs unless somebody observes them."""
        return self._own_executor

    @property
    def first_layer(self) -> int:
        """The target's layer with which verification begins."""
        return 0 if self._speculator is None else self._speculator.first_layer

    def attach(self, observer: Observer, *, on_host: bool) -> None:
        """Lets `observer` see the requests from now on, and what the host executor runs.

        Args:
            observer: told first of the requests under way.
            on_host: run the programs through a host executor meanwhile, whatever executor the engine has, so that
                the observer sees their steps.

        Raises `ValueError` for an observer that is attached already.
        """
        if any(observer is attached for attached, _ in self._observers):
            raise ValueError("this observer is attached to the engine already; one may be attached once at a time")
        self._observers.append((observer, on_host))
        self._apply_observers()
        for request in self._scheduler.unfinished():
            if request.slot >= 0:
                observer.request_started(request.number, len(request.prompt_ids))
            if request.phase is Phase.DECODE:
                observer.request_decoding(request.number)

    def detach(self, observer: Observer) -> None:
        """Ends what `attach` began; to the observer, requests under way end here."""
        self._observers = [entry for entry in self._observers if entry[0] is not observer]
        self._apply_observers()
        for request in self._scheduler.unfinished():
            if request.slot >= 0:
                observer.request_finished(request.number)

    def _apply_observers(self) -> None:
        self._leave_loop()
        observers = [observer for observer, _ in self._observers]
        # None, not an observer that sees nothing: then a round does no more than without this feature.
        observer = None if not observers else observers[0] if len(observers) == 1 else Observers(*observers)
        self._observer = observer or Observer()
        self._executor = self._own_executor
        if isinstance(self._own_executor, HostExecutor):
            self._own_executor.observer = observer
        elif any(on_host for _, on_host in self._observers):
            self._executor = HostExecutor(observer)

    def programs(self) -> Iterator[Program]:
        """Every program that ordinary requests run, built on demand; the largest first, as capture wants them."""
        for width in reversed(self.plan.prefill_widths):
            yield self._program("prefill", width)
        yield from self.rounds()

    def rounds(self) -> Iterator[Program]:
        """The rounds of every bucket that ordinary requests run, the largest first."""
        for bucket in reversed(self.plan.buckets):
            yield self._program("round", bucket)

    # Requests and slots

    def _load(self, request: Request) -> None:
        """Writes a request into its slot; it takes part in no round yet. No loop runs."""
        state, slot, params = self.state, request.slot, request.params
        prompt, stop = request.prompt_ids, request.stop_token_ids
        padding = (-1,) * (state.shape.max_stop_tokens - len(stop))
        upload(prompt, state.tokens[slot, : len(prompt)])
        upload((*stop, *padding), state.stop_token_ids[slot])
        state.length[slot] = len(prompt)
        state.limit[slot] = request.limit
        state.temperature[slot] = params.temperature
        state.top_k[slot] = params.top_k
        state.top_p[slot] = params.top_p
        state.min_p[slot] = params.min_p
        state.seed[slot] = request.seed
        for cleared in (state.finish_reason, state.failed, state.draft_count, state.ring_count, state.rounds):
            cleared[slot] = 0
        state.histogram[slot].zero_()
        self._mailbox.open(slot)
        if self._speculator is not None:
            self._speculator.admit(slot)
        self._builder.budget.admit(slot)
        self._observer.request_started(request.number, len(request.prompt_ids))

    def _prefill_chunk(self) -> None:
        request = self._scheduler.next_to_prefill()
        if request is None:
            return
        remaining = request.prefill_target - request.prefilled
        width = chunk_width(remaining, self.plan.prefill_widths)
        count = min(width, remaining)
        self.state.prefill_slot.fill_(request.slot)
        upload((request.prefilled, count), self.state.prefill_range)
        self._executor.run(self._program("prefill", width))
        request.prefilled += count

    def _start(self, request: Request) -> None:
        self.state.finished[request.slot] = False
        self._scheduler.start(request)
        self._observer.request_decoding(request.number)

    def _finish(
        self, request: Request, reason: FinishReason, *, error: str | None = None, by_device: bool = False
    ) -> None:
        """Ends a request: its result is made and its slot given back, for use once the loop has been left.

        `by_device`: the device has ended the row itself. Otherwise it is asked to, and what it still publishes of the
        row is for nobody.
        """
        if request.phase is Phase.DECODE and not by_device:
            self._mailbox.cancel(request.slot)
            self._ended.append(request.slot)
        finish_request(
            request,
            self.state,
            self._reader,
            self.plan.metrics,
            self._logprobs,
            reason,
            error=error,
            budget_rule=self.plan.budget_rule,
        )
        cached = request.cached_tokens if self.plan.reuse_generated else request.prompt_ids[: request.prefilled]
        if self._speculator is not None and self._speculator.unseen and len(cached) > request.prefilled:
            cached = cached[: max(request.prefilled, len(cached) - self._speculator.unseen)]
        if self._speculator is not None and request.phase is Phase.DECODE and not error:
            self._speculator.finish(request.slot, (*request.prompt_ids, *request.token_ids))
        # What no finite logits vouch for must not be read again, not even masked: zero times NaN is NaN.
        if error or request.phase is Phase.PREFILL:
            cached = ()
            if request.slot >= 0:
                self._unclean.append(request.slot)
        self._scheduler.finish(request, cached)
        if request.slot >= 0:
            self._observer.request_finished(request.number)

    # Rounds

    def _round(self) -> None:
        """Lets the loop run until the host may look, and delivers what came out."""
        if self._loop is not None and self._bucket() < self._loop.bucket:
            self._leave_loop()
            if not self._scheduler.decoding:
                return
        self.state.host.leave_on_finish[0] = self._scheduler.waiting
        if self._loop is None:
            self._loop = self._enter_loop()
        if next(self._loop.rounds, _ENDED) is _ENDED:
            self._loop = None
        self._collect()

    def _bucket(self) -> int:
        return bucket_for(len(self._scheduler.decoding), self.plan.buckets)

    def _enter_loop(self) -> _Loop:
        self._leave_loop()
        state, rows, bucket = self.state, self._scheduler.decoding, self._bucket()
        slots = [r.slot for r in rows] + [state.reserved_slot] * (bucket - len(rows))
        upload(slots, state.slot_of_row[:bucket])
        state.host.pause[0] = False
        # While a prompt is being written, its next chunk is due after one round.
        state.rounds_left.fill_(1 if self._scheduler.wants_control else self.plan.rounds_per_launch)
        state.running.fill_(True)
        logprobs = any(r.params.logprobs is not None for r in rows)
        return _Loop(self._executor.rounds(self._program("round", bucket, logprobs)), bucket)

    def _leave_loop(self) -> None:
        """Ends the loop, so that rows can come and go: afterwards the device is idle and all it published delivered."""
        if self._loop is not None:
            self._stop_loop()
            self._collect()
        for slot in self._ended:
            self.state.finished[slot] = True
        self._ended.clear()
        for slot in self._unclean:
            self._builder.clear_cache(slot)
        self._unclean.clear()

    def _stop_loop(self) -> None:
        """Asks for a pause and waits for the rounds under way."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self.state.host.pause[0] = True
            loop.rounds.close()

    def _collect(self) -> None:
        """Delivers what the rows have published since the last look."""
        now = time.perf_counter()
        for request in list(self._scheduler.decoding):
            self._deliver(request, now)

    def _deliver(self, request: Request, now: float) -> None:
        delivery = self._mailbox.collect(request.slot)
        stopped = bool(delivery.tokens) and record_tokens(request, delivery.tokens, now)
        if stopped:  # a stop string: the tokens past it are taken back, and the slot is cut off there
            self._finish(request, "stop", by_device=delivery.finished)
        elif delivery.finished:
            error = None
            if delivery.finish_reason == FINISH_ERROR:
                position = len(request.prompt_ids) + len(request.token_ids)
                error = f"the target model produced logits that are not finite at position {position}"
            self._finish(request, finish_name(delivery.finish_reason), error=error, by_device=True)

    def _program(self, kind: str, size: int, logprobs: bool = False) -> Program:
        key = (kind, size, logprobs)
        if key not in self._programs:
            if kind == "prefill":
                self._programs[key] = self._builder.prefill(size)
            else:
                buffers = self._logprob_buffers() if logprobs else None
                detailed = self.plan.metrics == "detailed"
                self._programs[key] = self._builder.round(size, self.plan.widths[size], buffers, detailed)
        return self._programs[key]

    def _logprob_buffers(self) -> LogprobBuffers:
        """Allocated with the first request that asks; most engines never need them."""
        if self._logprobs is None:
            size = (*self.state.tokens.shape, self.plan.max_logprobs + 1)
            self._logprobs = LogprobBuffers(
                torch.zeros(size, dtype=torch.float32, device=self.state.device),
                torch.zeros(size, dtype=torch.int32, device=self.state.device),
            )
        return self._logprobs
