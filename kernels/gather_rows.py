"""Gathers rows of a matrix: hidden states at places known on the device only."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, short_range, tl

_BLOCK = 1024
_KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.int32)


def gather_rows_reference(
    source: torch.Tensor, index: torch.Tensor, through: torch.Tensor | None, out: torch.Tensor
) -> None:
    """The specification of `gather_rows`: `source[index]`, or `source[through[index]]`.

    Args:
        source: [N, H], float32, float16, bfloat16 or int32.
        index: int32 [M], from 0 to N - 1, or to P - 1.
        through: int32 [P], from 0 to N - 1; None: the index is one into `source`.
        out: [M, H], like `source`, written.
    """
    rows = index if through is None else through.index_select(0, index)
    out.copy_(source.index_select(0, rows))


def _gather_rows_cpu(
    source: torch.Tensor, index: torch.Tensor, through: torch.Tensor | None, out: torch.Tensor
) -> None:
    rows = index if through is None else through.index_select(0, index)
    torch.index_select(source, 0, rows, out=out)


def gathered(source: torch.Tensor, index: torch.Tensor, through: torch.Tensor | None = None) -> torch.Tensor:
    """What `gather_rows` writes, in a tensor of its own."""
    out = source.new_empty((index.shape[0], source.shape[1]))
    gather_rows(source, index, through, out)
    return out


@jit(unspecialized=["columns"])
def _gather_rows_kernel(source, index, through, out, columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(index + place)
    if through is not None:
        row = tl.load(through + row)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    tl.store(out + place * columns + column, tl.load(source + row.to(tl.int64) * columns + column, mask=inside), inside)


def gather_rows_triton(
    source: torch.Tensor, index: torch.Tensor, through: torch.Tensor | None, out: torch.Tensor
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device = source.device
    check_tensor("source", source, dtypes=_KINDS, shape=(None, None), device=device)
    check_tensor("index", index, dtypes=(torch.int32,), shape=(None,), device=device)
    if through is not None:
        check_tensor("through", through, dtypes=(torch.int32,), shape=(None,), device=device)
    rows, columns = index.shape[0], source.shape[1]
    check_tensor("out", out, dtypes=(source.dtype,), shape=(rows, columns), device=device)
    if rows:
        check_some("source", "row", source.shape[0])
        if through is not None:
            check_some("through", "entry", through.shape[0])
    if out.numel():
        block = column_block(columns)
        _gather_rows_kernel[(rows, -(-columns // block))](
            source, index, through, out, columns, BLOCK=block, num_warps=4
        )


def column_block(columns: int) -> int:
    """How many columns of a row one program moves: the same for all rows of few, such as drafts' confidences."""
    return min(_BLOCK, short_range(columns))


def kernel_specs() -> list[KernelSpec]:
    """Hidden states, by an index and by one through another; token ids."""

    def spec(kind: str, columns: int, nested: bool) -> KernelSpec:
        return KernelSpec(
            op="gather_rows",
            variant=f"{kind}, {columns} column{'s' if columns > 1 else ''}{', nested' if nested else ''}",
            kernel=_gather_rows_kernel,
            arguments={
                "source": f"*{kind}",
                "out": f"*{kind}",
                "index": "*i32",
                "columns": "i32",
                **({"through": "*i32"} if nested else {}),
            },
            constants={"BLOCK": column_block(columns), **({} if nested else {"through": None})},
            num_stages=3,
            shape=f"8 rows of {columns}",
            bytes_moved=8 * ((8 if nested else 4) + 2 * columns * (4 if kind in ("fp32", "i32") else 2)),
            max_registers=48,
        )

    return [
        spec("bf16", 4096, False), spec("bf16", 4096, True), spec("fp32", 4096, False), spec("i32", 1, False)
    ]  # fmt: skip


def _gather_rows_fake(*args: object) -> None:
    return None


gather_rows = define_op(
    "gather_rows(Tensor source, Tensor index, Tensor? through, Tensor(a!) out) -> ()",
    cpu=_gather_rows_cpu,
    fake=_gather_rows_fake,
    cuda=gather_rows_triton,
)
"""`draftgraph::gather_rows`; see `gather_rows_reference`."""
