"""Several prediction modules, each applied at its own step of a round (DeepSeek-V3, section 2.2)."""

from __future__ import annotations

from typing import ClassVar

import torch

from ...graphs import DecodeState
from ...kernels.gather_rows import gather_rows
from ...kernels.pack_turn import pack_turn
from ...kernels.tokens_after import tokens_after
from ...kernels.window import Window
from ...model_zoo.draft_head import ModularHead
from ...profiling.floor import RoundShape, StepCost
from .autoregressive import HeadSpeculator
from .drafting import empty_window, part_of, step_window, window_width
from .state_history import StateHistory


class MultiModuleSpeculator(HeadSpeculator):
    """Draft s comes of module s modulo n, all K in one step.

    Module i reads, at position j, what module i - 1 made there and token j + 1 + i. In a round's first turn all modules
    run over the same positions, those of the accepted window and n - 1 before it: there the modules' keys and values
    were made from drafts, some of which may have been rejected. In a further turn, where K is 2n or more, the modules
    take the drafts for tokens, and what they made of the last position for the hidden states that the target would have
    there, as one module does that is applied again and again.
    """

    name: ClassVar[str] = "multi_module"

    _history: StateHistory
    _turn: Window
    _turn_states: torch.Tensor
    _turn_queries: torch.Tensor
    _made: torch.Tensor

    def __init__(
        self,
        num_speculative_tokens: int,
        head: ModularHead,
        *,
        target_states: tuple[int, ...],
        stream: int | None = None,
    ) -> None:
        """Takes the modules as they were loaded.

        Args:
            num_speculative_tokens: `K`, at most the number of modules, or a multiple of it.
            head: the modules.
            target_states: which hidden states the first of them reads.
            stream: of the noise with which drafts are sampled; None drafts greedily.
        """
        super().__init__(num_speculative_tokens, head, target_states=target_states, stream=stream)
        self._modules = head
        self._used = min(head.num_modules, num_speculative_tokens)
        """Modules that draft."""
        # The last module reads a token further than the one before, and so does a reused prefix.
        self.lookahead = self._used

    def allocate(self, state: DecodeState) -> None:
        """Allocates the modules' KV, what they read of the target, and what they leave to a further turn."""
        head, rows, device = self._head, state.shape.max_bucket, state.device
        self._cache = head.allocate_cache(state.shape.slots + 1, state.shape.context)
        self._history = StateHistory(state, head.state_size, modules=self._used)
        self._following = step_window(rows, window_width(rows), device)
        self._chooser.allocate(state, window_width(rows))
        width = window_width(rows * self._used)
        self._turn = empty_window(rows, width, device)
        self._turn_states = torch.zeros(width, dtype=torch.int32, device=device)
        self._turn_queries = torch.zeros(window_width(rows), dtype=torch.int32, device=device)
        # Of each module what it made of every row's last position, [n, N, hidden].
        size = (self._used, window_width(rows), head.config.target_hidden_size)
        self._made = torch.zeros(size, dtype=head.dtype, device=device)
        self._state = state

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Reads what was committed and drafts K tokens for every live row of the bucket."""
        window, states, last = self._history.pairs(state, bucket)
        owners, following = window.slot_of_row, part_of(self._following, bucket, window_width(bucket))
        hidden = self._history.values
        for step in range(self.num_speculative_tokens):
            module = step % self._used
            if step > 0 and module == 0:
                window, states, last = self._next_turn(state, owners, step)
                hidden = self._made.flatten(0, 1)
            if step > 0:
                # In a round's first window they stand already.
                window = self._followed(state, window, 1 + module, state.draft_tokens)
            if module == 0:
                hidden = self._modules.read_target(window, hidden, states, self._cache)
            else:
                hidden = self._modules.read_own(window, hidden, self._cache, module)
            hidden = self._modules.feedback(hidden, module)
            made = self._made[module, : last.shape[0]]
            gather_rows(hidden, last, None, made)
            logits = self._modules.logits(made, module)
            self._chooser.draft(state, step, logits[:bucket], owners, following, shift=step - 1)

    def _next_turn(
        self, state: DecodeState, owners: torch.Tensor, step: int
    ) -> tuple[Window, torch.Tensor, torch.Tensor]:
        """The n positions before each row's next draft, and what stands in for the target's hidden states there.

        Args:
            state: of the engine.
            owners: int32 [B], the slot of each row, the reserved one where a row has nothing to draft from.
            step: drafts so far.

        Returns:
            A window of n positions per row, of the reserved slot where no draft can follow, whose tokens are not set;
            int32 [W], which of the hidden states that the modules made each position reads; and int32 [N], where the
            last position of each row is packed.
        """
        bucket = owners.shape[0]
        window = part_of(self._turn, bucket, window_width(bucket * self._used))
        states = self._turn_states[: window.tokens.shape[0]]
        queries = self._turn_queries[: window_width(bucket)]
        pack_turn(
            state.length,
            state.limit,
            owners,
            step,
            self._used,
            self._made.shape[1],
            window.positions,
            window.slots,
            window.rows,
            window.cu_tokens,
            window.base,
            window.slot_of_row,
            states,
            queries,
        )
        return window, states, queries

    def _followed(self, state: DecodeState, window: Window, distance: int, drafts: torch.Tensor | None) -> Window:
        """The window with the tokens that follow its positions: committed ones, or drafts of this round."""
        tokens = torch.empty_like(window.tokens)
        tokens_after(state.tokens, state.length, drafts, window.slots, window.positions, distance, tokens)
        return window._replace(tokens=tokens)

    def observe(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:
        """Keeps the hidden states of the windows."""
        (values,) = states
        self._history.keep(state, window, values)

    def observe_prompt(self, state: DecodeState, window: Window, states: tuple[torch.Tensor, ...]) -> None:
        """Writes the modules' KV of the chunk.

        Near its end the modules read tokens past the prompt, which nobody knows: that is made anew in the first round.
        """
        (values,) = states
        hidden = values
        for module in range(self._used):
            shifted = self._followed(state, window, 1 + module, None)
            if module == 0:
                hidden = self._modules.read_target(shifted, hidden, None, self._cache)
            else:
                hidden = self._modules.read_own(shifted, hidden, self._cache, module)
            if module + 1 < self._used:
                hidden = self._modules.feedback(hidden, module)
        self._history.keep_last(window, values)

    def admit(self, slot: int) -> None:
        """Forgets the slot's last request."""
        self._history.admit(self._state, slot)

    def clear(self, slot: int) -> None:
        """Zeroes the modules' KV of the slot, and what was kept for it."""
        self._cache.clear(slot)
        self._history.clear(slot)

    def propose_cost(self, shape: RoundShape) -> StepCost:
        """One module per draft, each over n positions per row at least, with its logits."""
        depth = self.num_speculative_tokens
        step = self._forward_cost(shape, self._used, of_target=True) + self._head_cost(shape, 1)
        return step.times(depth)
