"""The engine's loop: admits, prefills a chunk, runs a round, hands out what was emitted."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field

import torch

from ..graphs import DecodeState, Executor, HostExecutor, Mailbox, Program, bucket_for
from ..graphs.buckets import chunk_width
from ..graphs.state import FINISH_ERROR
from ..profiling.floor import RoundShape, StepCost
from ..profiling.observer import Observer, Observers
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


@dataclass(eq=False)
class _Loop:
    """The decoding loop under way: an executor's iterator over one program, and for whom it runs."""

    rounds: Generator[None, None, None]
    version: int
    rows: list[Request] = field(default_factory=list)


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
        self._mailbox = Mailbox(state)
        self._programs: dict[tuple[str, int, bool], Program] = {}
        self._logprobs: LogprobBuffers | None = None
        self._loop: _Loop | None = None
        self._own_executor = executor
        self._observers: list[tuple[Observer, bool]] = []
        self._observer = Observer()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return self._scheduler.busy

    def submit(self, request: Request) -> None:
        """Queues a request; it starts when a slot is free."""
        self._scheduler.submit(request)

    def cancel(self, request: Request) -> None:
        """Ends a request with reason `cancelled`; its slot is free at once, and its tokens so far are kept."""
        if request.phase is Phase.DONE:
            return
        self._leave_loop()
        self._finish(request, "cancelled")

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

    def abort(self, error: str | None) -> None:
        """Ends every unfinished request and frees every slot: as failed with a message, or else as cancelled."""
        self._loop = None
        for request in self._scheduler.unfinished():
            self._finish(request, "cancelled" if error is None else "error", error=error)

    def warmup(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Runs every step of every program once with padding rows only, which touch the reserved slot alone."""
        self._leave_loop()
        state = self.state
        state.slot_of_row.fill_(state.reserved_slot)
        state.prefill_slot.fill_(state.reserved_slot)
        state.prefill_range.zero_()
        steps = [(program, step) for program in self.programs() for step in program.steps()]
        for number, (program, step) in enumerate(steps):
            if progress is not None:
                progress(number, len(steps), f"{program.name} {step.name}")
            self._executor.run(Program(step.name, step, state))
        if progress is not None:
            progress(len(steps), len(steps), "done")

    def propose_cost(self, shape: RoundShape) -> StepCost | None:
        """The least that drafting costs in a round; None for plain decoding."""
        return None if self._speculator is None else self._speculator.propose_cost(shape)

    def attach(self, observer: Observer, *, on_host: bool) -> None:
        """Lets `observer` see the requests from now on, and what the host executor runs.

        Args:
            observer: told first of the requests under way.
            on_host: run the programs through a host executor meanwhile, whatever executor the engine has, so that
                the observer sees their steps.
        """
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
        """Every program that ordinary requests run, built on demand."""
        for width in self.plan.prefill_widths:
            yield self._program("prefill", width)
        for bucket in self.plan.buckets:
            yield self._program("round", bucket)

    # Requests and slots

    def _load(self, request: Request) -> None:
        """Writes a request into its slot; it takes part in no round yet."""
        state, slot, params = self.state, request.slot, request.params
        prompt = torch.tensor(request.prompt_ids, dtype=torch.int32)
        stop = torch.full((state.shape.max_stop_tokens,), -1, dtype=torch.int32)
        stop[: len(request.stop_token_ids)] = torch.tensor(request.stop_token_ids, dtype=torch.int32)
        state.tokens[slot, : len(prompt)] = prompt.to(state.device)
        state.stop_token_ids[slot] = stop.to(state.device)
        state.length[slot] = len(prompt)
        state.limit[slot] = request.limit
        state.temperature[slot] = params.temperature
        state.top_k[slot] = params.top_k
        state.top_p[slot] = params.top_p
        state.min_p[slot] = params.min_p
        state.seed[slot] = request.seed
        for cleared in (state.cancel, state.finish_reason, state.failed, state.draft_count, state.rounds):
            cleared[slot] = 0
        state.histogram[slot].zero_()
        self._mailbox.open(slot)
        if self._speculator is not None:
            self._speculator.admit(slot)
        self._observer.request_started(request.number, len(request.prompt_ids))

    def _prefill_chunk(self) -> None:
        request = self._scheduler.next_to_prefill()
        if request is None:
            return
        remaining = request.prefill_target - request.prefilled
        width = chunk_width(remaining, self.plan.prefill_widths)
        count = min(width, remaining)
        self.state.prefill_slot.fill_(request.slot)
        self.state.prefill_range.copy_(torch.tensor([request.prefilled, count], dtype=torch.int32))
        self._executor.run(self._program("prefill", width))
        request.prefilled += count

    def _start(self, request: Request) -> None:
        self.state.finished[request.slot] = False
        self._scheduler.start(request)
        self._observer.request_decoding(request.number)

    def _finish(self, request: Request, reason: FinishReason, *, error: str | None = None) -> None:
        """Ends a request: its result is made and its slot given back."""
        if request.slot >= 0:
            self.state.finished[request.slot] = True
        finish_request(request, self.state, self.plan.metrics, self._logprobs, reason, error=error)
        cached = request.cached_tokens if self.plan.reuse_generated else request.prompt_ids[: request.prefilled]
        # What no finite logits vouch for must not be read again, not even masked: zero times NaN is NaN.
        if error or request.phase is Phase.PREFILL:
            cached = ()
            if request.slot >= 0:
                self._builder.clear_cache(request.slot)
        self._scheduler.finish(request, cached)
        if request.slot >= 0:
            self._observer.request_finished(request.number)

    # Rounds

    def _round(self) -> None:
        loop = self._loop
        if loop is None or loop.version != self._scheduler.version:
            loop = self._enter_loop()
        next(loop.rounds, None)
        now = time.perf_counter()
        for request in loop.rows:
            self._deliver(request, now)

    def _enter_loop(self) -> _Loop:
        self._leave_loop()
        rows = list(self._scheduler.decoding)
        bucket = bucket_for(len(rows), self.plan.buckets)
        slots = [r.slot for r in rows] + [self.state.reserved_slot] * (bucket - len(rows))
        self.state.slot_of_row[:bucket] = torch.tensor(slots, dtype=torch.int32).to(self.state.device)
        self.state.pause.fill_(False)
        self.state.running.fill_(True)
        logprobs = any(r.params.logprobs is not None for r in rows)
        program = self._program("round", bucket, logprobs)
        self._loop = _Loop(self._executor.rounds(program), self._scheduler.version, rows)
        return self._loop

    def _leave_loop(self) -> None:
        """Stops the loop at the end of its round, so that rows can come and go."""
        loop, self._loop = self._loop, None
        if loop is not None:
            self.state.pause.fill_(True)
            loop.rounds.close()

    def _deliver(self, request: Request, now: float) -> None:
        delivery = self._mailbox.collect(request.slot)
        stopped = bool(delivery.tokens) and record_tokens(request, delivery.tokens, now)
        if stopped:  # a stop string: the tokens past it are taken back, and the slot is cut off there
            self._finish(request, "stop")
        elif delivery.finished:
            error = None
            if delivery.finish_reason == FINISH_ERROR:
                position = len(request.prompt_ids) + len(request.token_ids)
                error = f"the target model produced logits that are not finite at position {position}"
            self._finish(request, finish_name(delivery.finish_reason), error=error)

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
