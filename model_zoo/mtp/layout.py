"""How families name and wire their prediction modules."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, FINAL_NORM, EMBEDDING, HEAD = (
    "embedding norm",
    "hidden norm",
    "projection",
    "final norm",
    "embedding",
    "head",
)
"""The parts of a module besides its decoder layer."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One family's way. In names, `{}` stands for the module's number."""

    title: str
    """For people."""
    layer: str
    """What the names of a module's decoder layer begin with."""
    parts: Mapping[str, str]
    """The names of its other tensors."""
    marks: tuple[str, ...]
    """The parts by whose names modules of this layout are known."""
    hidden_first: bool = False
    """The projection takes [hidden, embedding]; otherwise [embedding, hidden]."""
    zeroes_first: bool = True
    """The embedding beside the hidden state at position 0 is taken for zero."""
    unit_offset: bool = False
    """Norms multiply with `1 + weight`."""
    full_attention: bool = False
    """The layers attend to everything, whatever the target's do; otherwise they are of the kind that those are."""

    def numbers(self, names: Iterable[str]) -> list[int]:
        """The numbers of the modules that have any part of their own, ascending."""
        own = [_pattern(self.parts[part]) for part in self.marks if "{}" in self.parts[part]]
        # Where all parts are shared, each decoder layer is a module.
        own = own or [re.compile(_escaped(self.layer) + ".+")]
        return sorted({int(match[1]) for name in names for pattern in own if (match := pattern.fullmatch(name))})

    def describes(self, names: Collection[str]) -> bool:
        """Whether there are modules of this layout among the tensors."""
        marks = [_pattern(self.parts[part]) for part in self.marks]
        return any(pattern.fullmatch(name) for name in names for pattern in marks)

    def place(self, name: str, numbers: Collection[int]) -> tuple[str, str | None] | None:
        """What a tensor is.

        Args:
            name: as it is stored.
            numbers: of the modules.

        Returns:
            What its decoder layer's names begin with, and the rest of its own; its whole name and None for another
            part of a module; None for a tensor that is of none of them.
        """
        for pattern in map(_pattern, self.parts.values()):
            match = pattern.fullmatch(name)
            if match and (not match.groups() or int(match[1]) in numbers):
                return name, None
        match = re.match(_escaped(self.layer), name)
        if match and int(match[1]) in numbers:
            return match[0], name[match.end() :]
        return None


def _escaped(name: str) -> str:
    return re.escape(name).replace(r"\{\}", r"(\d+)")


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(_escaped(name))


LAYOUTS: Mapping[str, Layout] = {
    "deepseek": Layout(
        title="DeepSeek-V3 and GLM-4 names",
        layer="model.layers.{}.",
        parts={
            EMBEDDING_NORM: "model.layers.{}.enorm.weight",
            HIDDEN_NORM: "model.layers.{}.hnorm.weight",
            PROJECTION: "model.layers.{}.eh_proj.weight",
            FINAL_NORM: "model.layers.{}.shared_head.norm.weight",
            EMBEDDING: "model.layers.{}.embed_tokens.weight",
            HEAD: "model.layers.{}.shared_head.head.weight",
        },
        marks=(EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, FINAL_NORM),
    ),
    "qwen": Layout(
        title="Qwen3-Next names",
        layer="mtp.layers.{}.",
        parts={
            EMBEDDING_NORM: "mtp.pre_fc_norm_embedding.weight",
            HIDDEN_NORM: "mtp.pre_fc_norm_hidden.weight",
            PROJECTION: "mtp.fc.weight",
            FINAL_NORM: "mtp.norm.weight",
        },
        marks=(EMBEDDING_NORM, HIDDEN_NORM, PROJECTION),
        zeroes_first=False,
        unit_offset=True,
        full_attention=True,
    ),
    "mimo": Layout(
        title="MiMo names",
        layer="model.mtp_layers.{}.",
        parts={
            EMBEDDING_NORM: "model.mtp_layers.{}.token_layernorm.weight",
            HIDDEN_NORM: "model.mtp_layers.{}.hidden_layernorm.weight",
            PROJECTION: "model.mtp_layers.{}.input_proj.weight",
            FINAL_NORM: "model.mtp_layers.{}.final_layernorm.weight",
        },
        marks=(EMBEDDING_NORM, HIDDEN_NORM, PROJECTION, FINAL_NORM),
        hidden_first=True,
    ),
    "ernie": Layout(
        title="ERNIE 4.5 names",
        layer="model.mtp_block.{}.",
        parts={
            EMBEDDING_NORM: "model.mtp_emb_norm.{}.weight",
            HIDDEN_NORM: "model.mtp_hidden_norm.{}.weight",
            PROJECTION: "model.mtp_linear_proj.{}.weight",
        },
        marks=(EMBEDDING_NORM, HIDDEN_NORM, PROJECTION),
    ),
}
"""By key of `MtpConfig.layout`."""


def layout_of(names: Collection[str]) -> str | None:
    """The key of the layout whose modules are among the tensors; None: there are no modules."""
    return next((key for key, layout in LAYOUTS.items() if layout.describes(names)), None)
