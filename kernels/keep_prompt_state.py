"""Keeps the last hidden state of a prompt's chunk for the first round, in which a drafter reads it once more."""

from __future__ import annotations

import torch

from .gather_rows import column_block
from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, tl

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def keep_prompt_state_reference(
    values: torch.Tensor,
    base: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    first: int,
    kept: torch.Tensor,
    seen: torch.Tensor,
    start: torch.Tensor,
) -> None:
    """The specification of `keep_prompt_state`; reads nothing on the host.

    Args:
        values: float32, float16 or bfloat16 [W, S], neither 0, of the chunk, a window of one row.
        base: int32 [1], the chunk's first position.
        cu_tokens: int32 [2]; the second is how many tokens the chunk has.
        slot_of_row: int32 [1].
        first: which row of `kept` is slot 0's.
        kept: [N, S], like `values`, N at least `first + R1`; row `first + slot` becomes the last of the chunk's values.
        seen: int32 [R1], written: the last position, as if all before it had been read and it had not.
        start: int32 [R1], written: `first + slot`.
    """
    slot, last = slot_of_row.long(), (cu_tokens[1:] - 1).clamp_min(0)
    kept.index_copy_(0, slot + first, values.index_select(0, last))
    start.index_copy_(0, slot, slot_of_row + first)
    seen.index_copy_(0, slot, base + last)


@jit(unspecialized=["columns", "first"])
def _keep_prompt_state_kernel(  # type: ignore[no-untyped-def]
    values,
    base,
    cu_tokens,
    slot_of_row,
    kept,
    seen,
    start,
    columns,
    first,
    BLOCK: tl.constexpr,
):
    slot = tl.load(slot_of_row).to(tl.int64)
    last = tl.maximum(tl.load(cu_tokens + 1) - 1, 0).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    tl.store(kept + (first + slot) * columns + column, tl.load(values + last * columns + column, mask=inside), inside)
    if tl.program_id(0) == 0:
        tl.store(seen + slot, tl.load(base) + last.to(tl.int32))
        tl.store(start + slot, first + slot.to(tl.int32))


def keep_prompt_state_triton(
    values: torch.Tensor,
    base: torch.Tensor,
    cu_tokens: torch.Tensor,
    slot_of_row: torch.Tensor,
    first: int,
    kept: torch.Tensor,
    seen: torch.Tensor,
    start: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device, int32 = values.device, (torch.int32,)
    check_tensor("values", values, dtypes=_FLOATS, shape=(None, None), device=device)
    columns = values.shape[1]
    check_some("values", "row", values.shape[0])
    check_some("values", "column", columns)
    check_tensor("base", base, dtypes=int32, shape=(1,), device=device)
    check_tensor("cu_tokens", cu_tokens, dtypes=int32, shape=(2,), device=device)
    check_tensor("slot_of_row", slot_of_row, dtypes=int32, shape=(1,), device=device)
    check_tensor("kept", kept, dtypes=(values.dtype,), shape=(None, columns), device=device)
    check_tensor("seen", seen, dtypes=int32, shape=(None,), device=device)
    check_tensor("start", start, dtypes=int32, shape=(seen.shape[0],), device=device)
    slots = seen.shape[0]
    check_some("seen", "slot", slots)
    if kept.shape[0] < slots:
        raise ValueError(f"kept has {kept.shape[0]} rows; accepted: at least {slots}, one per slot of seen")
    if not 0 <= first <= kept.shape[0] - slots:
        raise ValueError(f"first is {first}; accepted: 0 to {kept.shape[0] - slots}")
    block = column_block(columns)
    _keep_prompt_state_kernel[(-(-columns // block),)](
        values, base, cu_tokens, slot_of_row, kept, seen, start, columns, first, BLOCK=block, num_warps=4
    )


def kernel_specs() -> list[KernelSpec]:
    """In two types that models have."""
    return [
        KernelSpec(
            op="keep_prompt_state",
            variant=kind,
            kernel=_keep_prompt_state_kernel,
            arguments={
                "values": f"*{kind}",
                "kept": f"*{kind}",
                **dict.fromkeys(["base", "cu_tokens", "slot_of_row", "seen", "start"], "*i32"),
                **dict.fromkeys(["columns", "first"], "i32"),
            },
            constants={"BLOCK": column_block(4096)},
            num_stages=3,
            shape="a chunk, hidden 4096",
            bytes_moved=20 + 2 * 4096 * (4 if kind == "fp32" else 2),
            max_registers=48,
        )
        for kind in ("bf16", "fp32")
    ]


def _keep_prompt_state_fake(*args: object) -> None:
    return None


keep_prompt_state = define_op(
    "keep_prompt_state(Tensor values, Tensor base, Tensor cu_tokens, Tensor slot_of_row, int first, Tensor(a!) kept, "
    "Tensor(b!) seen, Tensor(c!) start) -> ()",
    cpu=keep_prompt_state_reference,
    fake=_keep_prompt_state_fake,
    cuda=keep_prompt_state_triton,
)
"""`draftgraph::keep_prompt_state`; see `keep_prompt_state_reference`."""
