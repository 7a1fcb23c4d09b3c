"""The head of a model: logits, written where the sampling ops read them."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .linear import linear
from .registration import define_op
from .triton_support import KernelSpec, check_tensor, jit, round_to, tl

_BLOCK = 1024
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def project_logits_reference(hidden: torch.Tensor, weight: torch.Tensor, soft_cap: float, out: torch.Tensor) -> None:
    """The specification: `hidden @ weight.T` into `out`, and `cap * tanh(logits / cap)` of it in float32.

    Args:
        hidden: [W, hidden].
        weight: [V, hidden], like `hidden`; on the CPU it may be packed.
        soft_cap: Gemma 2's final soft cap; 0 for none.
        out: [W, V], like `hidden`, written.

    Raises:
        ValueError: `out` has another shape or type than the logits.
    """
    _check_out(hidden, weight, out)
    out.copy_(_capped(F.linear(hidden, weight), soft_cap) if soft_cap else F.linear(hidden, weight))


def _capped(logits: torch.Tensor, soft_cap: float) -> torch.Tensor:
    return (logits.float() / soft_cap).tanh_().mul_(soft_cap)


def _check_out(hidden: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    wanted = [hidden.shape[0], weight.shape[0]]
    if list(out.shape) != wanted or out.dtype != hidden.dtype:
        kinds = [str(kind).removeprefix("torch.") for kind in (out.dtype, hidden.dtype)]
        raise ValueError(f"out is {kinds[0]} {list(out.shape)}; accepted: {kinds[1]} {wanted}")


def _project_logits_cpu(hidden: torch.Tensor, weight: torch.Tensor, soft_cap: float, out: torch.Tensor) -> None:
    _check_out(hidden, weight, out)
    logits = linear(hidden, weight)
    if soft_cap == 0.0:
        out.copy_(logits)
        return
    for row, target in zip(logits, out, strict=True):  # a row's float32 copies stay in the cache
        target.copy_(_capped(row, soft_cap))


@jit
def _soft_cap_kernel(logits, soft_cap, numel, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < numel
    x = tl.div_rn(tl.load(logits + at, mask=inside, other=0.0).to(tl.float32), soft_cap)
    # Near 0 the quotient of exponentials would cancel; the series is exact to float32 below 1/4.
    y = x * x
    near = x * (1.0 + y * (-1.0 / 3 + y * (2.0 / 15 + y * (-17.0 / 315 + y * (62.0 / 2835)))))
    shrunk = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - shrunk) / (1.0 + shrunk)
    far = tl.where(x < 0, -far, far)
    capped = soft_cap * tl.where(tl.abs(x) < 0.25, near, far)
    tl.store(logits + at, round_to(capped, logits.dtype.element_ty), mask=inside)


def soft_cap_triton(logits: torch.Tensor, soft_cap: float) -> None:
    """Caps `logits` [W, V] in place: the launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take, or a cap that is not positive.
    """
    check_tensor("logits", logits, dtypes=_FLOATS, shape=(None, None))
    if not soft_cap > 0.0:
        raise ValueError(f"soft_cap is {soft_cap}; accepted: more than 0")
    if logits.numel():
        grid = (-(-logits.numel() // _BLOCK),)
        _soft_cap_kernel[grid](logits, soft_cap, logits.numel(), BLOCK=_BLOCK, num_warps=4)


def project_logits_cuda(hidden: torch.Tensor, weight: torch.Tensor, soft_cap: float, out: torch.Tensor) -> None:
    """The product by cuBLAS straight into `out`, then the cap in place.

    Raises:
        ValueError: an argument that the product or the kernel could not take.
    """
    check_tensor("hidden", hidden, dtypes=_FLOATS, shape=(None, None))
    check_tensor("weight", weight, dtypes=(hidden.dtype,), shape=(None, hidden.shape[1]), device=hidden.device)
    shape = (hidden.shape[0], weight.shape[0])
    check_tensor("out", out, dtypes=(hidden.dtype,), shape=shape, device=hidden.device)
    if soft_cap < 0.0:
        raise ValueError(f"soft_cap is {soft_cap}; accepted: 0 for none, or more")
    torch.mm(hidden, weight.t(), out=out)
    if soft_cap:
        soft_cap_triton(out, soft_cap)


def kernel_specs() -> list[KernelSpec]:
    """The soft cap in the types that models have; the product is cuBLAS's."""

    def spec(kind: str) -> KernelSpec:
        return KernelSpec(
            op="project_logits",
            variant=f"soft cap, {kind}",
            kernel=_soft_cap_kernel,
            arguments={"logits": f"*{kind}", "soft_cap": "fp32", "numel": "i32:16"},
            constants={"BLOCK": _BLOCK},
            num_stages=3,
            shape="8 tokens, vocabulary 256000",
            bytes_moved=2 * 8 * 256000 * (4 if kind == "fp32" else 2),
            max_registers=64,
        )

    return [spec("bf16"), spec("fp16"), spec("fp32")]


def _project_logits_fake(hidden: torch.Tensor, weight: torch.Tensor, soft_cap: float, out: torch.Tensor) -> None:
    return None


project_logits = define_op(
    "project_logits(Tensor hidden, Tensor weight, float soft_cap, Tensor(a!) out) -> ()",
    cpu=_project_logits_cpu,
    fake=_project_logits_fake,
    cuda=project_logits_cuda,
    packed_cpu=True,
)
"""`draftgraph::project_logits`; see `project_logits_reference`."""
