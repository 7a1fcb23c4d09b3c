"""The target while a head learns from it: frozen, run by transformers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .layers import LayerShape, layer_shape_of
from .trainee import TargetFacts


class FrozenTarget:
    """Gives hidden states, and the weights that heads begin with."""

    def __init__(self, directory: Path, *, dtype: torch.dtype, device: torch.device, name: str) -> None:
        """Loads the target.

        Args:
            directory: of its checkpoint.
            dtype: that it runs in.
            device: that it runs on.
            name: as the user gave it, for the exported config.
        """
        from transformers import AutoModelForCausalLM

        self.device, self.dtype, self.name = device, dtype, name
        with _no_bars():
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        self._model = model.to(device).eval().requires_grad_(False)
        self._config: Mapping[str, Any] = json.loads((directory / "config.json").read_text())
        self.num_layers = int(self._text("num_hidden_layers"))

    def _text(self, field: str) -> Any:
        return {**self._config, **self._config.get("text_config", {})}.get(field)

    @torch.no_grad()
    def hidden(
        self, tokens: torch.Tensor, valid: torch.Tensor, layers: tuple[int, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs texts.

        Args:
            tokens: int64 [B, T], padded at the end.
            valid: bool [B, T].
            layers: indices into transformers' `hidden_states`.

        Returns:
            [B, T, n * Ht], those states side by side, and [B, T, Ht], the last after the final norm.
        """
        kept: dict[int, torch.Tensor] = {}
        decoder = self._model.get_decoder()
        hooks = []
        for index in set(layers) - {0}:
            layer = decoder.layers[index - 1]
            hooks.append(layer.register_forward_hook(_keeper(kept, index)))
        if 0 in layers:
            hooks.append(decoder.layers[0].register_forward_pre_hook(_first_keeper(kept), with_kwargs=True))
        try:
            # Padding stands at the end, where a causal model's valid tokens do not see it.
            final = decoder(input_ids=tokens, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        states = torch.cat([kept[index] for index in layers], -1) if layers else final[..., :0]
        return states, final

    def facts(self, dtype: torch.dtype = torch.float32, last_layers: int = 4) -> TargetFacts:
        """What heads are built beside, in the type that they learn in."""
        decoder = self._model.get_decoder()
        norm = getattr(decoder.norm, "weight", None)
        plain = type(decoder.norm).__name__ in _PLAIN_NORMS
        layers = []
        for layer in decoder.layers[-last_layers:] if plain else ():
            layers.append({name: value.to(dtype) for name, value in layer.state_dict().items()})
        return TargetFacts(
            config={**self._config, **self._config.get("text_config", {})},
            name=self.name,
            embedding=self._model.get_input_embeddings().weight.to(dtype),
            head=self._model.get_output_embeddings().weight.to(dtype),
            final_norm=norm.to(dtype) if plain and norm is not None else None,
            layers=tuple(layers),
            embedding_scale=float(getattr(self._model.get_input_embeddings(), "embed_scale", 1.0)),
            soft_cap=float(self._text("final_logit_softcapping") or 0.0),
        )

    def layer_shape(self, intermediate_size: int | None = None) -> LayerShape:
        """The sizes of a head's layers: the target's own, where they are those of plain attention."""
        return layer_shape_of({**self._config, **self._config.get("text_config", {})}, intermediate_size)


@contextlib.contextmanager
def _no_bars() -> Iterator[None]:
    """Without transformers' progress bars, which would stand between ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


_PLAIN_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm", "MiMoRMSNorm", "Ernie4_5RMSNorm")
"""transformers' classes of x / rms(x) * weight."""


def _keeper(kept: dict[int, torch.Tensor], index: int) -> Any:
    def keep(layer: nn.Module, inputs: Any, output: Any) -> None:
        kept[index] = output[0] if isinstance(output, tuple) else output

    return keep


def _first_keeper(kept: dict[int, torch.Tensor]) -> Any:
    def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        kept[0] = args[0] if args else kwargs["hidden_states"]

    return keep
