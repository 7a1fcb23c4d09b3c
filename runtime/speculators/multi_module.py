"""Several prediction modules, each applied at its own step of a round (DeepSeek-V3, section 2.2)."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from ...graphs import DecodeState
from ...kernels.window import Window
from ...model_zoo.draft_head import ModularHead
from ...profiling.floor import RoundShape, StepCost
from .autoregressive import HeadSpeculator
from .drafting import part_of, step_window, window_width
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
        """Allocates the modules' KV and what they read of the target."""
        head, rows = self._head, state.shape.max_bucket
        self._cache = head.allocate_cache(state.shape.slots + 1, state.shape.context)
        self._history = StateHistory(state, head.state_size, modules=self._used)
        self._following = step_window(rows, window_width(rows), state.device)
        self._chooser.allocate(state, window_width(rows))
        self._state = state

    def propose(self, state: DecodeState, bucket: int) -> None:
        """Reads what was committed and drafts K tokens for every live row of the bucket."""
        window, states, last = self._history.pairs(state, bucket)
        owners, following = window.slot_of_row, part_of(self._following, bucket, window_width(bucket))
        hidden, made = self._history.values, list[torch.Tensor]()
        for step in range(self.num_speculative_tokens):
            module = step % self._used
            if step == 0:
                hidden = self._modules.read_target(window, hidden, states, self._cache)
            else:
                if module == 0:
                    window, hidden, last = self._next_turn(state, owners, step, made)
                    made.clear()
                tokens = self._tokens_after(state, window, 1 + module)
                hidden = self._modules.read_own(window._replace(tokens=tokens), hidden, self._cache, module)
            hidden = self._modules.feedback(hidden, module)
            made.append(hidden.index_select(0, last))
            logits = self._modules.logits(made[-1], module)
            self._chooser.draft(state, step, logits[:bucket], owners, following, shift=step - 1)

    def _tokens_after(self, state: DecodeState, window: Window, distance: int) -> torch.Tensor:
        """int32 [W], the token so far after each position: a committed one, or a draft of this round."""
        index = window.positions + distance
        ahead = index - state.length.index_select(0, window.slots)
        context, drafts = state.tokens.shape[1], state.draft_tokens.shape[1]
        committed = window.slots * context + index.clamp_max(context - 1)
        drafted = window.slots * drafts + ahead.clamp(0, drafts - 1)
        # What is no proposal has no token: -1.
        return torch.where(
            ahead < 0,
            state.tokens.flatten().index_select(0, committed),
            state.draft_tokens.flatten().index_select(0, drafted).clamp_min(0),
        )

    def _next_turn(
        self, state: DecodeState, owners: torch.Tensor, step: int, made: list[torch.Tensor]
    ) -> tuple[Window, torch.Tensor, torch.Tensor]:
        """The n positions before each row's next draft, and what stands in for the target's hidden states there.

        Args:
            state: of the engine.
            owners: int32 [B], the slot of each row, the reserved one where a row has nothing to draft from.
            step: drafts so far.
            made: n of [N, hidden], N at least B: what the modules made of each row's last position.

        Returns:
            A window of n positions per row, of the reserved slot where no draft can follow; [W, hidden]; and int32 [N],
            where the last position of each row is packed.
        """
        modules, bucket, slots = self._used, owners.shape[0], state.length.shape[0]
        length = state.length.index_select(0, owners)
        goes_on = (owners < slots - 1) & (state.limit.index_select(0, owners) - length - 1 > step)
        owners = torch.where(goes_on, owners, slots - 1)
        base = torch.where(goes_on, length - 1 + step - modules, 0)
        width = window_width(bucket * modules)
        place = torch.arange(width, dtype=torch.int32, device=state.device)
        rows, padding = place // modules, width - bucket * modules
        used = rows < bucket
        row = rows.clamp_max(bucket - 1)
        window = Window(
            tokens=torch.zeros_like(place),
            positions=torch.where(used, base.index_select(0, row) + place % modules, 0),
            slots=torch.where(used, owners.index_select(0, row), slots - 1),
            rows=torch.where(used, rows, -1),
            cu_tokens=place.new_ones(bucket + 1).cumsum(0, dtype=torch.int32).sub(1).mul(modules),
            base=base,
            slot_of_row=owners,
        )
        hidden = torch.stack([part[:bucket] for part in made], 1).flatten(0, 1)
        last = torch.arange(made[0].shape[0], dtype=torch.int32, device=state.device).clamp_max(bucket - 1)
        return window, F.pad(hidden, (0, 0, 0, padding)), last * modules + (modules - 1)

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
            shifted = window._replace(tokens=self._prompt_after(state, window, 1 + module))
            if module == 0:
                hidden = self._modules.read_target(shifted, hidden, None, self._cache)
            else:
                hidden = self._modules.read_own(shifted, hidden, self._cache, module)
            if module + 1 < self._used:
                hidden = self._modules.feedback(hidden, module)
        self._history.keep_last(window, values)

    def _prompt_after(self, state: DecodeState, window: Window, distance: int) -> torch.Tensor:
        context = state.tokens.shape[1]
        places = window.slots * context + (window.positions + distance).clamp_max(context - 1)
        return state.tokens.flatten().index_select(0, places)

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
