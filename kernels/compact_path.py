"""After a tree verify: the keys and values of the accepted path move to where a chain would have left them."""

from __future__ import annotations

import torch

from .registration import define_op
from .triton_support import KernelSpec, check_some, check_tensor, jit, next_power_of_2, tl

_BLOCK = 128
# Elements of a head that one program moves.


def compact_path_reference(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    base: torch.Tensor,
    slot_of_row: torch.Tensor,
) -> None:
    """The specification of `compact_path`."""
    depth = torch.arange(path.shape[1], device=path.device)[None, :]
    moved = depth < accepted[:, None]
    # What stays is copied onto itself in the reserved slot.
    slot = torch.where(moved, slot_of_row[:, None], key_cache.shape[1] - 1).long()
    source = torch.where(moved, base[:, None] + path, 0).long()
    target = torch.where(moved, base[:, None] + depth, 0).long()
    for cache in (key_cache, value_cache):
        # One byte or two at a time, since not every device indexes float8.
        raw = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        raw[:, slot, :, target] = raw[:, slot, :, source]


@jit(unspecialized=["num_rows", "depth", "context"])
def _compact_path_kernel(  # type: ignore[no-untyped-def]
    key_cache,
    value_cache,
    path,
    accepted,
    base,
    slot_of_row,
    num_rows,
    depth,
    context,
    key_layer_stride,
    key_slot_stride,
    key_head_stride,
    key_stride,
    value_layer_stride,
    value_slot_stride,
    value_head_stride,
    value_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program per layer and row, head, and block of a head's key or value.
    layer = (tl.program_id(0) // num_rows).to(tl.int64)
    row = tl.program_id(0) % num_rows
    head = tl.program_id(1)
    part = tl.program_id(2)
    count = tl.minimum(tl.load(accepted + row), depth)
    index = tl.arange(0, DEPTH)
    source = tl.load(path + row * depth + index, mask=index < count, other=0)
    start = tl.load(base + row)
    # A chain's path is where it should be already.
    moved = (index < count) & (source != index) & (start + source < context)
    if tl.max(moved.to(tl.int32), 0) == 0:
        return
    slot = tl.load(slot_of_row + row).to(tl.int64)
    source_at = (start + source).to(tl.int64)
    target_at = (start + index).to(tl.int64)
    KEY_PARTS: tl.constexpr = (KEY_DIM + BLOCK - 1) // BLOCK  # noqa: N806
    if part < KEY_PARTS:
        at = part * BLOCK + tl.arange(0, BLOCK)
        mask = moved[:, None] & (at < KEY_DIM)[None, :]
        keys = key_cache + layer * key_layer_stride + slot * key_slot_stride + head * key_head_stride + at[None, :]
        key = tl.load(keys + source_at[:, None] * key_stride, mask=mask)
        # Everything is read before anything is written: a target may be another one's source.
        tl.debug_barrier()
        tl.store(keys + target_at[:, None] * key_stride, key, mask=mask)
    else:
        at = (part - KEY_PARTS) * BLOCK + tl.arange(0, BLOCK)
        mask = moved[:, None] & (at < VALUE_DIM)[None, :]
        values = value_cache + layer * value_layer_stride + slot * value_slot_stride + head * value_head_stride
        value = tl.load(values + at[None, :] + source_at[:, None] * value_stride, mask=mask)
        tl.debug_barrier()
        tl.store(values + at[None, :] + target_at[:, None] * value_stride, value, mask=mask)


def compact_path_triton(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    base: torch.Tensor,
    slot_of_row: torch.Tensor,
) -> None:
    """The launch for CUDA tensors, or for CPU tensors under the interpreter.

    Raises:
        ValueError: an argument that the kernel could not take.
    """
    device = path.device
    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
    check_tensor("key_cache", key_cache, dtypes=floats, shape=(None,) * 5, device=device, contiguous=False)
    layers, slots, heads, context, key_dim = key_cache.shape
    check_some("key_cache", "slot", slots)
    check_some("key_cache", "position", context)
    sizes = (layers, slots, heads, context, None)
    same = (key_cache.dtype,)
    check_tensor("value_cache", value_cache, dtypes=same, shape=sizes, device=device, contiguous=False)
    value_dim = value_cache.shape[4]
    check_tensor("path", path, dtypes=(torch.int32,), shape=(None, None), device=device)
    rows, depth = path.shape
    if depth > 64:
        raise ValueError(f"path has {depth} columns; accepted: at most 64, the nodes of a tree")
    for name, index in (("accepted", accepted), ("base", base), ("slot_of_row", slot_of_row)):
        check_tensor(name, index, dtypes=(torch.int32,), shape=(rows,), device=device)
    if rows == 0 or depth == 0:
        return
    if key_cache.element_size() == 1:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    parts = -(-key_dim // _BLOCK) + -(-value_dim // _BLOCK)
    _compact_path_kernel[(layers * rows, heads, parts)](
        key_cache,
        value_cache,
        path,
        accepted,
        base,
        slot_of_row,
        rows,
        depth,
        context,
        *key_cache.stride()[:4],
        *value_cache.stride()[:4],
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        DEPTH=next_power_of_2(depth),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def kernel_specs() -> list[KernelSpec]:
    """Each element size, for shallow and the deepest trees, and an MLA cache."""

    def spec(variant: str, kind: str, element: int, depth: int, key_dim: int = 128, value_dim: int = 128) -> KernelSpec:
        heads = 8 if key_dim == value_dim else 1
        arguments = dict.fromkeys(["path", "accepted", "base", "slot_of_row"], "*i32")
        arguments |= {"key_cache": f"*{kind}", "value_cache": f"*{kind}", "num_rows": "i32", "depth": "i32"}
        arguments |= {"context": "i32"}
        for name in ("key", "value"):
            arguments |= {f"{name}_{kind}stride": "i32:16" for kind in ("layer_", "slot_", "head_", "")}
        return KernelSpec(
            op="compact_path",
            variant=variant,
            kernel=_compact_path_kernel,
            arguments=arguments,
            constants={"KEY_DIM": key_dim, "VALUE_DIM": value_dim, "DEPTH": depth, "BLOCK": _BLOCK},
            num_stages=3,
            shape=f"32 layers, 1 row, {heads} heads, 5 tokens",
            bytes_moved=2 * 32 * heads * 5 * (key_dim + value_dim) * element,
            max_registers=168,
        )

    return [
        spec("bf16, depth 8", "bf16", 2, 8),
        spec("bf16, depth 64", "bf16", 2, 64),
        spec("fp32, depth 64", "fp32", 4, 64),
        spec("float8, depth 64", "u8", 1, 64),
        spec("bf16, 576 and 512, depth 8", "bf16", 2, 8, 576, 512),
    ]


def _compact_path_fake(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    base: torch.Tensor,
    slot_of_row: torch.Tensor,
) -> None:
    return None


_compact_path = define_op(
    "compact_path(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor path, Tensor accepted, Tensor base, "
    "Tensor slot_of_row) -> ()",
    cpu=compact_path_reference,
    fake=_compact_path_fake,
    cuda=compact_path_triton,
)


def compact_path(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    base: torch.Tensor,
    slot_of_row: torch.Tensor,
) -> None:
    """Moves the accepted path of each row's window to the front of the window, in all layers at once.

    Position `base[b] + i` gets what was cached at `base[b] + path[b, i]`, for `i < accepted[b]`. Sources and targets
    may overlap: all is read before anything is written. A path that is in place already costs nothing.

    Args:
        key_cache: [L, R1, Hkv, S, Dk], written to.
        value_cache: [L, R1, Hkv, S, Dv], written to.
        path: int32 [B, D], D at most 64: window indices of the accepted tokens, ascending, so `path[b, i] >= i`.
        accepted: int32 [B]: how many of them hold, 0 for padding rows.
        base: int32 [B]: the cached position of window index 0.
        slot_of_row: int32 [B]: no two rows with accepted tokens share a slot.
    """
    _compact_path(key_cache, value_cache, path, accepted, base, slot_of_row)
