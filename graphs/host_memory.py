"""Memory that the host and the device both see, and reads of device memory that wait for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_STAGING_BYTES = 1 << 20
"""The most that one copy of `HostReader` moves; longer tensors are read in pieces."""

# The names of NumPy's array interface, version 3.
_TYPE_STRINGS = {torch.bool: "|b1", torch.int32: "<i4", torch.int64: "<i8", torch.float32: "<f4"}


@dataclass(frozen=True, eq=False)
class SharedTensor:
    """One piece of memory, as two tensors: what one side writes the other sees, with no copy and no wait.

    Nothing orders the two sides but the device's release and the host's order of reads; see `Mailbox`.
    """

    host: torch.Tensor
    """On the CPU; page-locked where the device is another."""
    device: torch.Tensor
    """The same memory for kernels. On the CPU it is `host`."""


class _MappedMemory:
    """Page-locked memory under the address at which the device sees it, which is the host's (unified addressing)."""

    def __init__(self, owner: torch.Tensor) -> None:
        self.owner = owner  # lives as long as the tensor that is made of this, which keeps this object
        self.__cuda_array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": tuple(owner.shape),
            "typestr": _TYPE_STRINGS[owner.dtype],
            "data": (owner.data_ptr(), False),
            "strides": None,
        }


def shared(size: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> SharedTensor:
    """Allocates zeroed memory that host and device share.

    On fake CUDA tensors, which have no memory, the two sides are two tensors.

    Args:
        size: of the tensor; no dimension may be 0.
        dtype: bool, int32, int64 or float32.
        device: the CPU or a CUDA device.

    Raises:
        ValueError: another type of elements or of device, or a size without elements.
        RuntimeError: the device cannot use the host's address.
    """
    kind = torch.device(device).type
    if dtype not in _TYPE_STRINGS:
        accepted = ", ".join(str(known).removeprefix("torch.") for known in _TYPE_STRINGS)
        raise ValueError(f"dtype of shared memory is {str(dtype).removeprefix('torch.')}; accepted: {accepted}")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device of shared memory is {device}; accepted: cpu, cuda")
    if 0 in size:
        raise ValueError(f"size of shared memory is {list(size)}; accepted: positive sizes")
    if kind == "cpu":
        both = torch.zeros(size, dtype=dtype, device=device)
        return SharedTensor(both, both)
    if isinstance(torch.empty(0), FakeTensor):
        return SharedTensor(torch.zeros(size, dtype=dtype), torch.zeros(size, dtype=dtype, device=device))
    host = torch.zeros(size, dtype=dtype, pin_memory=True)
    mapped = torch.as_tensor(_MappedMemory(host), device=device)
    if mapped.data_ptr() != host.data_ptr():
        raise RuntimeError(f"torch copied page-locked memory to {device} instead of mapping it")
    return SharedTensor(host, mapped)


def upload(values: Sequence[int], target: torch.Tensor) -> None:
    """Writes integers to a tensor of the device, in the order of its other work, and does not wait for them to arrive.

    Args:
        values: as many as `target` has elements.
        target: of one dimension, contiguous.
    """
    if target.device.type == "cpu" or isinstance(target, FakeTensor):
        target.copy_(torch.tensor(values, dtype=target.dtype))
        return
    # torch keeps page-locked memory from being used again until the copy is done.
    target.copy_(torch.tensor(values, dtype=target.dtype, pin_memory=True), non_blocking=True)


class HostReader:
    """Reads device tensors while the device goes on with something else.

    A copy on a stream of its own waits for no other stream, so the host can read what a finished row left while a
    loop that was launched once still runs for the others. Its caller knows that what it reads has been written: the
    word by which the host learned that the row finished was released after it.
    """

    def __init__(self, device: torch.device | str) -> None:
        """Makes the stream and the page-locked buffer: allocating one later could wait for the device."""
        self._stream: torch.cuda.Stream | None = None
        if torch.device(device).type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._staging = torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True)

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """The content of `tensor` on the CPU: `tensor` itself if it is there, else a copy.

        Raises:
            ValueError: a tensor on another device that is not contiguous; making it so would be work for the device.
        """
        if tensor.device.type == "cpu":
            return tensor
        if self._stream is None:
            raise ValueError(f"a reader of CPU tensors was given one on {tensor.device}")
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor to read has strides {tensor.stride()}; accepted: contiguous")
        result = torch.empty(tensor.shape, dtype=tensor.dtype)
        source, target = (part.reshape(-1).view(torch.uint8) for part in (tensor, result))
        for start in range(0, source.numel(), _STAGING_BYTES):
            piece = source[start : start + _STAGING_BYTES]
            staged = self._staging[: piece.numel()]
            with torch.cuda.stream(self._stream):
                staged.copy_(piece, non_blocking=True)
            self._stream.synchronize()
            target[start : start + _STAGING_BYTES] = staged
        return result
