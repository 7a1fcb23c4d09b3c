"""The programs that an engine runs: a round of decoding for each bucket, and a chunk of prefill for each width.

While(running)
  propose                drafts for every live row; or, where the number of drafts varies:
    propose, Switch(stop){ draft[0] }, Switch(stop){ draft[1] } ...
  budget                 how many drafts each row sends on; picks the width
  Switch(width)          pack the windows, run the target once, keep the logits
  accept                 which drafts stand, and one more token
  commit                 append, stop, publish
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..graphs import DecodeState, Node, Program, Sequence, Step, Switch, While, map_steps
from ..kernels.commit import commit
from ..kernels.pack_window import pack_prefill, pack_window
from ..kernels.record_logprobs import record_logprobs
from ..kernels.window import Window
from ..kernels.workspace import WorkspacePool
from ..model_zoo.decoder import DecoderModel, KvCache
from .adaptive import Budget, FixedBudget
from .speculators import BaseSpeculator, StepwiseSpeculator
from .verification import VerificationPolicy


@dataclass(frozen=True)
class LogprobBuffers:
    """What a request that asks for log-probabilities gets them from.

    Slots by context by 1 + N: entry 0 is the emitted token, then the N most likely.
    """

    values: torch.Tensor
    """float32 [R1, C, N + 1]."""
    tokens: torch.Tensor
    """int32 [R1, C, N + 1]."""


class RoundBuilder:
    """Builds the programs of one engine; each is built once and kept by its caller."""

    def __init__(
        self,
        model: DecoderModel,
        cache: KvCache,
        state: DecodeState,
        speculator: BaseSpeculator | None,
        policy: VerificationPolicy,
        budget: Budget | None = None,
    ) -> None:
        """Takes the parts; without a budget every draft is verified."""
        self._model, self._cache, self._state = model, cache, state
        self._speculator, self._policy = speculator, policy
        self.budget = budget or FixedBudget(state)
        self.workspaces = WorkspacePool()
        """The engine's: every step of every program runs inside it."""

    def round(
        self,
        bucket: int,
        widths: tuple[int, ...],
        logprobs: LogprobBuffers | None = None,
        detailed: bool = False,
    ) -> Program:
        """The decoding loop of a bucket.

        Args:
            bucket: rows of `slot_of_row` that take part.
            widths: the verify widths, ascending; the last must hold every row's full window.
            logprobs: where to record log-probabilities, or None not to.
            detailed: also record every round's pair of (drafts verified, drafts accepted).
        """
        state = self._state
        self.budget.prepare(bucket, widths)
        nodes = self._propose(bucket)
        nodes.append(self._budget(bucket, widths))
        verify = tuple(self._verify(bucket, width) for width in widths)
        # A body without a switch is one graph that can be launched ahead of knowing how the last one ended.
        nodes.append(Switch(state.width_index, verify) if len(verify) > 1 else verify[0])
        nodes.append(Step("accept", lambda s: self._policy.accept(s, bucket)))
        if logprobs is not None:
            nodes.append(self._record(bucket, logprobs))
        nodes.append(self._commit(bucket, detailed))
        return self._program(f"round[{bucket}]", While(state.running, Sequence(*nodes)))

    def prefill(self, width: int) -> Program:
        """Writes the KV of one chunk of the prompt in slot `prefill_slot`, positions `prefill_range`: the target's,
        and then what the drafter keeps.
        """
        state, speculator = self._state, self._speculator
        rows = torch.zeros(1, dtype=torch.int32, device=state.device)
        cu_tokens = torch.zeros(2, dtype=torch.int32, device=state.device)
        base = torch.zeros(1, dtype=torch.int32, device=state.device)
        window = Window(
            tokens=torch.zeros(width, dtype=torch.int32, device=state.device),
            positions=torch.zeros(width, dtype=torch.int32, device=state.device),
            slots=torch.zeros(width, dtype=torch.int32, device=state.device),
            rows=torch.zeros(width, dtype=torch.int32, device=state.device),
            cu_tokens=cu_tokens,
            base=base,
            slot_of_row=rows,
        )

        def chunk(s: DecodeState) -> None:
            pack_prefill(
                s.tokens,
                s.prefill_slot,
                s.prefill_range,
                window.tokens,
                window.positions,
                window.slots,
                window.rows,
                window.cu_tokens,
                window.base,
                window.slot_of_row,
            )
            wanted = () if speculator is None else speculator.target_states
            hidden, states = self._model.forward_with_aux(window, self._cache, wanted)
            if speculator is not None:
                speculator.prefill(s, window, hidden)
                if wanted:
                    speculator.observe_prompt(s, window, states)

        return self._program(f"prefill[{width}]", Step(f"prefill[{width}]", chunk))

    def clear_cache(self, slot: int) -> None:
        """Zeroes the KV of a slot, the drafter's too."""
        self._cache.clear(slot)
        if self._speculator is not None:
            self._speculator.clear(slot)

    def _program(self, name: str, root: Node) -> Program:
        return Program(name, map_steps(root, self._in_workspaces), self._state)

    def _in_workspaces(self, step: Step) -> Step:
        def run(state: DecodeState) -> None:
            with self.workspaces:
                step.fn(state)

        return replace(step, fn=run)

    def _propose(self, bucket: int) -> list[Node]:
        """Drafting: one step, or one for every draft that may be left out."""
        speculator, budget = self._speculator, self.budget
        if speculator is None:
            return []
        if not (budget.varies_depth and isinstance(speculator, StepwiseSpeculator) and speculator.splits):
            return [Step("propose", lambda s: speculator.propose(s, bucket))]
        stepwise = speculator

        def start(s: DecodeState) -> None:
            stepwise.start(s, bucket)
            budget.keep(s, bucket, 0)

        def draft(step: int) -> Step:
            def advance(s: DecodeState) -> None:
                stepwise.advance(s, bucket, step)
                if step + 1 < stepwise.num_speculative_tokens:
                    budget.keep(s, bucket, step + 1)

            return Step(f"draft[{step}]", advance)

        # Once `stop` is set nothing clears it, so that the drafts after the first one left out are left out too.
        drafts = [Switch(budget.stop, (draft(step),)) for step in range(stepwise.num_speculative_tokens)]
        return [Step("propose", start), *drafts]

    def _budget(self, bucket: int, widths: tuple[int, ...]) -> Step:
        width_table = torch.tensor(widths, dtype=torch.int32).to(self._state.device)

        return Step("budget", lambda s: self.budget.plan(s, bucket, width_table))

    def _verify(self, bucket: int, width: int) -> Step:
        def verify(s: DecodeState) -> None:
            window = Window(
                tokens=s.window_tokens[:width],
                positions=s.window_positions[:width],
                slots=s.window_slots[:width],
                rows=s.window_rows[:width],
                cu_tokens=s.cu_tokens[: bucket + 1],
                base=s.base[:bucket],
                slot_of_row=s.slot_of_row[:bucket],
            )
            pack_window(
                s.tokens,
                s.length,
                s.draft_tokens,
                window.cu_tokens,
                window.slot_of_row,
                window.tokens,
                window.positions,
                window.slots,
                window.rows,
            )
            self._model.logits(self._forward(s, window), out=s.logits[:width])

        return Step(f"verify[{width}]", verify)

    def _forward(self, state: DecodeState, window: Window) -> torch.Tensor:
        """The target's last hidden states over the rows' windows, from the layer at which the drafter left off."""
        model, speculator = self._model, self._speculator
        begun = None if speculator is None else speculator.verify_hidden(state, window)
        if speculator is None or begun is None:
            wanted = () if speculator is None else speculator.target_states
            hidden, states = model.forward_with_aux(window, self._cache, wanted)
            if speculator is not None and wanted:
                speculator.observe(state, window, states)
            return hidden
        layers = (speculator.first_layer, model.config.num_layers)
        return model.final_norm(model.forward_range(begun, window, self._cache, *layers))

    def _record(self, bucket: int, buffers: LogprobBuffers) -> Step:
        def record(s: DecodeState) -> None:
            record_logprobs(
                s.logits,
                s.emitted,
                s.accepted,
                s.failed,
                s.cu_tokens[: bucket + 1],
                s.slot_of_row[:bucket],
                s.length,
                buffers.values,
                buffers.tokens,
            )

        return Step("logprobs", record)

    def _commit(self, bucket: int, detailed: bool) -> Step:
        speculator = self._speculator

        def finish(s: DecodeState) -> None:
            if speculator is not None:
                speculator.commit(s, bucket)
            self.budget.note(s, bucket)
            commit(
                s.emitted,
                s.accepted,
                s.failed,
                s.cu_tokens[: bucket + 1],
                s.slot_of_row[:bucket],
                s.stop_token_ids,
                s.limit,
                s.cancel,
                s.pause,
                s.leave_on_finish,
                s.taken,
                s.tokens,
                s.length,
                s.finished,
                s.finish_reason,
                s.ring_tokens,
                s.ring_count,
                s.published,
                s.rounds,
                s.histogram,
                s.round_pairs if detailed else None,
                s.rounds_left,
                s.running,
            )

        return Step("commit", finish)
