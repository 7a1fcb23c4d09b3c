"""The sizes with which the kernels of `window_attention` are launched: blocks, splits, warps."""

from __future__ import annotations

from .triton_support import next_power_of_2, row_range

_PROGRAMS = 512
"""How many programs a launch aims at when it chooses the number of splits: a few per multiprocessor of a large GPU."""
_MAX_SPLITS = 128


def _parts(size: int) -> tuple[int, int]:
    """Two powers of two, each 0 or at least 16, that hold a head of `size`: 96 is 64 and 32, 576 is 512 and 64.

    256 is twice 128: as one product of float32 operands it would not fit in registers.
    """
    first = 128 if size == 256 else max(16, 1 << (size.bit_length() - 1))
    return first, max(16, next_power_of_2(size - first)) if size > first else 0


def launch_config(
    *,
    width: int,
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    context: int,
    key_dim: int,
    value_dim: int,
    bytes_each: int,
) -> dict[str, int]:
    """The constants of `attend_kernel` and the sizes of its splits, of which none depends on a length.

    The blocks are the largest that spill on none of the targets in `compile_report`.

    Args:
        width: `W`.
        rows: `B`.
        num_heads: `Hq`.
        num_kv_heads: `Hkv`.
        context: `S`.
        key_dim: `Dk`.
        value_dim: `Dv`.
        bytes_each: of an operand of the products.
    """
    group = num_heads // num_kv_heads
    largest = max(key_dim, value_dim)
    # As many queries as a row usually has, and as the sums of their values fit in registers.
    most = 16 if bytes_each == 4 or largest > 256 else 32 if largest > 128 else 64
    block_m = min(max(16, next_power_of_2(-(-width * group // rows))), most)
    # Products of float32 numbers are exact, on ordinary units, with both operands in registers.
    block_n = 16 if bytes_each == 4 else 32 if block_m == 64 else 64
    while block_n > 16 and block_n * (key_dim + value_dim) * bytes_each > 16 * 1024:
        block_n //= 2
    tiles = (width * group + rows * (block_m - 1)) // block_m
    wanted = min(_MAX_SPLITS, -(-_PROGRAMS // (tiles * num_kv_heads)))
    split = -(-context // (wanted * 64)) * 64
    constants = {
        "num_heads": num_heads,
        "group": group,
        "ROWS": row_range(rows),
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "split_size": split,
        "num_splits": -(-context // split),
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
    }
    constants["KEY_1"], constants["KEY_2"] = _parts(key_dim)
    # The halves of float32 latents, as one product, would not fit in registers either.
    large = bytes_each == 4 and value_dim == 512
    constants["VALUE_1"], constants["VALUE_2"] = (256, 256) if large else _parts(value_dim)
    return constants


def launch_options(constants: dict[str, int], bytes_each: int, hip: bool, *, sliding: bool) -> dict[str, int]:
    """Warps and stages of `attend_kernel`: fewer stages, and on NVIDIA more warps, for large heads of float32.

    On AMD two stages of long blocks, with the bounds of a sliding window besides, would take more than 256 registers.
    """
    large = bytes_each == 4 and constants["KEY_DIM"] >= 256
    single = large or (hip and sliding and constants["BLOCK_N"] == 64)
    return {"num_warps": 8 if large and not hip else 4, "num_stages": 1 if single else 2}


def combine_config(constants: dict[str, int]) -> dict[str, int]:
    """The constants of the second launch, from those of the first."""
    names = ("ROWS", "VALUE_DIM", "split_size", "num_splits", "num_heads", "group")
    block = next_power_of_2(constants["VALUE_DIM"])
    return {name: constants[name] for name in names} | {
        "BLOCK_VALUE": block,
        "BLOCK_SPLITS": max(2, 2048 // block),
    }
