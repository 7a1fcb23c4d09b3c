"""Looks up the tokens of a window in the embedding table, scaled where the model scales."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, next_power_of_2, round_to, tl

_BLOCK = 1024
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def embed_tokens_reference(tokens: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    """The specification: `table[tokens] * scale`, the product computed in float32 and rounded to the table's type.

    Args:
        tokens: int32 [W], from 0 to V - 1.
        table: [V, hidden], float16, bfloat16 or float32.
        scale: a number of the table's type; 1.0 leaves the rows as they are.

    Returns:
        [W, hidden], like `table`.
    """
    rows = F.embedding(tokens, table)
    return rows if scale == 1.0 else (rows.float() * scale).to(table.dtype)


def _embed_tokens_cpu(tokens: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    rows = F.embedding(tokens, table)
    return rows if scale == 1.0 else rows.mul_(scale)


@jit
def _embed_tokens_kernel(  # type: ignore[no-untyped-def]
    tokens,
    table,
    output,
    scale,
    hidden,
    SCALED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    token = tl.load(tokens + place).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    row = tl.load(table + token * hidden + column, mask=inside)
    if SCALED:
        row = round_to(row.to(tl.float32) * scale, output.dtype.element_ty)
    tl.store(output + place * hidden + column, row, mask=inside)


def embed_tokens_triton(tokens: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    check_tensor("tokens", tokens, dtypes=(torch.int32,), shape=(None,))
    check_tensor("table", table, dtypes=_FLOATS, shape=(None, None), device=tokens.device)
    width, hidden = tokens.shape[0], table.shape[1]
    if width:
        check_some("table", "row", table.shape[0])
    output = torch.empty((width, hidden), dtype=table.dtype, device=table.device)
    if output.numel():
        block = min(_BLOCK, next_power_of_2(hidden))
        _embed_tokens_kernel[(width, -(-hidden // block))](
            tokens, table, output, scale, hidden, SCALED=scale != 1.0, BLOCK=block, num_warps=4
        )
    return output


def kernel_specs() -> list[KernelSpec]:
    """Plain and scaled, in the types that models have."""

    def spec(kind: str, scaled: bool) -> KernelSpec:
        return KernelSpec(
            op="embed_tokens",
            variant=f"{kind}{', scaled' if scaled else ''}",
            kernel=_embed_tokens_kernel,
            arguments={
                "tokens": "*i32",
                "table": f"*{kind}",
                "output": f"*{kind}",
                "scale": "fp32",
                "hidden": "i32:16",
            },
            constants={"SCALED": scaled, "BLOCK": _BLOCK},
            num_stages=3,
            shape="8 tokens, hidden 4096",
            bytes_moved=8 * (4 + 2 * 4096 * (4 if kind == "fp32" else 2)),
            max_registers=48,
        )

    return [spec("bf16", False), spec("bf16", True), spec("fp16", True), spec("fp32", True)]


def _embed_tokens_fake(tokens: torch.Tensor, table: torch.Tensor, scale: float) -> torch.Tensor:
    return table.new_empty((tokens.shape[0], table.shape[1]))


embed_tokens = define_op(
    "embed_tokens(Tensor tokens, Tensor table, float scale) -> Tensor",
    cpu=_embed_tokens_cpu,
    fake=_embed_tokens_fake,
    cuda=embed_tokens_triton,
)
"""`draftgraph::embed_tokens`; see `embed_tokens_reference`."""
