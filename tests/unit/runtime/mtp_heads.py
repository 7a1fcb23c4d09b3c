"""Tiny targets with prediction modules in their checkpoints, by the published names, and what modules compute.

The mathematics take a whole sequence, without cache, windows or packing, and share no code with the package. A module's
decoder layer is transformers' own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

HIDDEN, LAYERS = 32, 2
EPS = 1e-5

_COMMON: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": EPS,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
_EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_LATENT = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
}


@dataclass(frozen=True)
class Style:
    """One family's modules."""

    config: str
    options: dict[str, Any]
    layer: str
    """What names of module i's layer begin with."""
    parts: tuple[str, str, str, str | None]
    """Names of the norms of embedding and hidden state, of the projection, and of the final norm."""
    model_type: str | None = None
    """In place of transformers' own."""
    hidden_first: bool = False
    zeroes_first: bool = True
    unit_offset: bool = False
    native_offset: bool = False
    """transformers' layer has such norms itself."""
    count_key: str | None = "num_nextn_predict_layers"


def _deepseek_parts(prefix: str) -> tuple[str, str, str, str]:
    return f"{prefix}enorm", f"{prefix}hnorm", f"{prefix}eh_proj", f"{prefix}shared_head.norm"


_NUMBERED = f"model.layers.{{{LAYERS}+i}}."
STYLES: dict[str, Style] = {
    "deepseek": Style("DeepseekV3Config", {**_EXPERTS, **_LATENT}, _NUMBERED, _deepseek_parts(_NUMBERED)),
    "glm": Style("Glm4MoeConfig", {**_EXPERTS, "attention_bias": True}, _NUMBERED, _deepseek_parts(_NUMBERED)),
    "qwen": Style(
        "Qwen3Config",
        {},
        "mtp.layers.{i}.",
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
        zeroes_first=False,
        unit_offset=True,
        count_key=None,
    ),
    "qwen3_next": Style(
        "Qwen3NextConfig",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [0],
            # Models of this family whose layers are all alike are not published, but their heads have such layers.
            "layer_types": ["full_attention"] * (LAYERS + 1),
        },
        "mtp.layers.{i}.",
        ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm"),
        zeroes_first=False,
        unit_offset=True,
        native_offset=True,
        count_key=None,
    ),
    "mimo": Style(
        "Qwen2Config",
        {},
        "model.mtp_layers.{i}.",
        tuple(
            f"model.mtp_layers.{{i}}.{part}"
            for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
        ),  # type: ignore[arg-type]
        model_type="mimo",
        hidden_first=True,
    ),
    "ernie": Style(
        "Ernie4_5_MoeConfig",
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 1,
        },
        "model.mtp_block.{i}.",
        ("model.mtp_emb_norm.{i}", "model.mtp_hidden_norm.{i}", "model.mtp_linear_proj.{i}", None),
    ),
}


def named(pattern: str, index: int) -> str:
    """A name of module `index`."""
    return pattern.replace(f"{{{LAYERS}+i}}", str(LAYERS + index)).replace("{i}", str(index))


class Modules:
    """A target and its modules: on disk in one checkpoint, in memory as transformers has them."""

    def __init__(
        self,
        path: Path,
        tokenizer: Any,
        style: str,
        *,
        count: int = 1,
        own: bool = False,
        silent: int | None = None,
        seed: int = 3,
    ) -> None:
        """Builds them.

        Args:
            path: where to.
            tokenizer: of the target.
            style: a key of `STYLES`.
            count: how many modules.
            own: store embedding and head with each module: equal to the target's with the first, others after it.
            silent: a token without an embedding, in a model that says but four tokens.
            seed: of the weights.
        """
        self.path, self.count, self.style, self.vocab = path, count, STYLES[style], len(tokenizer)
        torch.manual_seed(seed)
        options = {**_COMMON, **self.style.options, "num_hidden_layers": LAYERS + count, "vocab_size": self.vocab}
        config = getattr(transformers, self.style.config)(**options)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.data = 0.2 * normal(*tensor.shape)
            elif tensor.ndim == 1 and not name.endswith("inv_freq"):
                tensor.data = (0.0 if name.endswith("bias") else 1.0) + 0.3 * normal(*tensor.shape)
        model.lm_head.weight.data *= 2
        if silent is not None:
            model.get_input_embeddings().weight.data[silent] = 0.0
            heard = torch.zeros(self.vocab, 1).index_fill(0, torch.arange(10, 14), 1.0)
            model.lm_head.weight.data *= 0.02 + heard
        self.model = model
        self.parts: list[dict[str, torch.Tensor]] = []
        shared: dict[str, torch.Tensor] = {}
        for _ in range(count):
            made = {
                "enorm": 1.0 + 0.3 * normal(HIDDEN),
                "hnorm": 1.0 + 0.3 * normal(HIDDEN),
                "projection": normal(HIDDEN, 2 * HIDDEN) / (2 * HIDDEN) ** 0.5,
                "norm": 1.0 + 0.3 * normal(HIDDEN),
            }
            # Names without a number are of all modules together.
            shared = shared or made
            self.parts.append(shared if "i}" not in self.style.parts[0] else made)
        self.embedding, self.head = model.get_input_embeddings().weight.data, model.lm_head.weight.data
        self.tables = [(self.embedding, self.head)] * count
        if own:
            others = [(normal(self.vocab, HIDDEN), normal(self.vocab, HIDDEN)) for _ in range(count - 1)]
            self.tables = [self.tables[0], *others]
        self._own = own
        self.layers = list(model.model.layers[LAYERS:])
        self._save(tokenizer)
        model.model.layers = model.model.layers[:LAYERS]
        model.config.num_hidden_layers = LAYERS

    def _save(self, tokenizer: Any) -> None:
        self.model.save_pretrained(self.path)
        tokenizer.save_pretrained(self.path)
        stored = load_file(self.path / "model.safetensors")
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in stored.items():
            number = int(name.split(".")[2]) if name.startswith("model.layers.") else 0
            if number < LAYERS:
                tensors[name] = tensor
                continue
            prefix, rest = named(self.style.layer, number - LAYERS), name.removeprefix(f"model.layers.{number}.")
            differs = self.style.unit_offset and not self.style.native_offset and rest.endswith("norm.weight")
            offset = 1.0 if differs else 0.0
            tensors[prefix + rest] = tensor - offset
        for index, parts in enumerate(self.parts):
            for key, pattern in zip(("enorm", "hnorm", "projection", "norm"), self.style.parts, strict=True):
                if pattern is not None:
                    offset = 1.0 if self.style.unit_offset and key != "projection" else 0.0
                    tensors[f"{named(pattern, index)}.weight"] = parts[key] - offset
            if self._own:
                prefix = named(self.style.layer, index)
                table, head = self.tables[index]
                tensors[f"{prefix}embed_tokens.weight"] = table.clone()
                tensors[f"{prefix}shared_head.head.weight"] = head.clone()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.path / "model.safetensors")
        hf = json.loads((self.path / "config.json").read_text())
        hf["num_hidden_layers"] = LAYERS
        hf.pop("num_nextn_predict_layers", None)
        for key in ("layer_types", "mlp_layer_types"):
            if hf.get(key) is not None:
                hf[key] = hf[key][:LAYERS]
        if self.style.model_type is not None:
            hf["model_type"] = self.style.model_type
        if self.style.count_key is not None:
            hf[self.style.count_key] = self.count
        (self.path / "config.json").write_text(json.dumps(hf))

    def split(self, path: Path, *, tables: bool = False) -> Path:
        """Copies the modules into a checkpoint of their own; `tables`: with the target's embedding and head."""
        path.mkdir(parents=True, exist_ok=True)
        target = ("model.layers.0.", "model.layers.1.", "model.norm.", "model.embed_tokens.", "lm_head.")
        tensors = load_file(self.path / "model.safetensors")
        own = {name: tensor for name, tensor in tensors.items() if not name.startswith(target)}
        if tables:
            own |= {name: tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        save_file(own, path / "model.safetensors")
        (path / "config.json").write_text((self.path / "config.json").read_text())
        return path

    def states(self, tokens: list[int]) -> torch.Tensor:
        """The target's last hidden states, after its final norm."""
        with torch.no_grad():
            return self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    def module(self, index: int, tokens: list[int], hidden: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """One module over a whole sequence: [T, H] to [T, H]."""
        parts, length = self.parts[index], len(tokens)
        embedded = table[tokens]
        if self.style.zeroes_first:
            embedded = torch.cat((torch.zeros(1, HIDDEN), embedded[1:]))
        sides = [_rms(embedded, parts["enorm"]), _rms(hidden, parts["hnorm"])]
        joined = torch.cat(sides[::-1] if self.style.hidden_first else sides, 1) @ parts["projection"].T
        positions = torch.arange(length)[None]
        cos_sin = self.model.model.rotary_emb(joined[None], positions)
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            out = self.layers[index](
                joined[None], attention_mask=mask, position_ids=positions, position_embeddings=cos_sin
            )
        out = (out[0] if isinstance(out, tuple) else out)[0]
        return out if self.style.parts[3] is None else _rms(out, parts["norm"])

    def drafts(self, tokens: list[int], depth: int, target: Modules | None = None) -> list[torch.Tensor]:
        """The logits of `depth` drafts after `tokens`, greedily; `target`: another one that they draft for."""
        target = target or self
        known, base, logits = list(tokens), target.states(tokens[:-1]), []
        rows, made = base, []
        for step in range(depth):
            index = step % self.count
            if step and index == 0:
                base = rows = torch.cat((base, *made))
                made = []
            table, head = self.tables[index] if target is self else (target.embedding, target.head)
            rows = self.module(index, known[1 + index : 1 + index + len(rows)], rows, table)
            made.append(rows[-1:])
            logits.append(F.linear(rows[-1], head))
            known.append(int(logits[-1].argmax()))
        return logits


def _rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
