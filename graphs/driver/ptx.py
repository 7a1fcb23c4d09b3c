"""The kernels of graphs/ in PTX, and how their arguments are packed.

The text is written by hand so that neither NVRTC nor nvcc is needed, and for an old PTX version so that every driver
with conditional nodes takes it. The device function `cudaGraphSetConditional` has no definition in any library: the
driver resolves it when it loads the module. Each kernel runs as one thread. Flags and indices are loaded as volatile:
steps of the same launch change them, and so may the host.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from .protocol import Kernel, NoOp, Publish, SetIf, SetSwitch, SetWhile

MODULE = """\
.version 8.4
.target sm_80
.address_size 64

.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);

// The handle becomes 1 if the flag is not 0, else 0.
.visible .entry draftgraph_set_while(.param .u64 handle, .param .u64 flag)
.maxntid 1, 1, 1
{
    .reg .pred %is_set;
    .reg .b16 %flag;
    .reg .b32 %value;
    .reg .b64 %handle, %address;
    ld.param.u64 %handle, [handle];
    ld.param.u64 %address, [flag];
    cvta.to.global.u64 %address, %address;
    ld.volatile.global.u8 %flag, [%address];
    setp.ne.u16 %is_set, %flag, 0;
    selp.b32 %value, 1, 0, %is_set;
    {
        .param .b64 to_handle;
        .param .b32 to_value;
        st.param.b64 [to_handle], %handle;
        st.param.b32 [to_value], %value;
        call.uni cudaGraphSetConditional, (to_handle, to_value);
    }
    ret;
}

// The handle becomes the index, or the number of branches if the index is negative or too large: as an unsigned
// number a negative one is too large.
.visible .entry draftgraph_set_switch(.param .u64 handle, .param .u64 index, .param .u32 branches)
.maxntid 1, 1, 1
{
    .reg .b32 %index, %branches, %value;
    .reg .b64 %handle, %address;
    ld.param.u64 %handle, [handle];
    ld.param.u64 %address, [index];
    ld.param.u32 %branches, [branches];
    cvta.to.global.u64 %address, %address;
    ld.volatile.global.u32 %index, [%address];
    min.u32 %value, %index, %branches;
    {
        .param .b64 to_handle;
        .param .b32 to_value;
        st.param.b64 [to_handle], %handle;
        st.param.b32 [to_value], %value;
        call.uni cudaGraphSetConditional, (to_handle, to_value);
    }
    ret;
}

// The handle becomes 1 if the index is that of the branch, else 0.
.visible .entry draftgraph_set_if(.param .u64 handle, .param .u64 index, .param .u32 branch)
.maxntid 1, 1, 1
{
    .reg .pred %is_chosen;
    .reg .b32 %index, %branch, %value;
    .reg .b64 %handle, %address;
    ld.param.u64 %handle, [handle];
    ld.param.u64 %address, [index];
    ld.param.u32 %branch, [branch];
    cvta.to.global.u64 %address, %address;
    ld.volatile.global.u32 %index, [%address];
    setp.eq.u32 %is_chosen, %index, %branch;
    selp.b32 %value, 1, 0, %is_chosen;
    {
        .param .b64 to_handle;
        .param .b32 to_value;
        st.param.b64 [to_handle], %handle;
        st.param.b32 [to_value], %value;
        call.uni cudaGraphSetConditional, (to_handle, to_value);
    }
    ret;
}

// count += 1; word = count << 32 | (index & 0x7FFFFFFF) << 1 | flag, where index may be a null pointer, for 0.
// What earlier nodes wrote is visible to a host that reads the word with acquire order.
.visible .entry draftgraph_publish(.param .u64 flag, .param .u64 index, .param .u64 count, .param .u64 word)
.maxntid 1, 1, 1
{
    .reg .pred %is_set, %no_index;
    .reg .b16 %flag;
    .reg .b32 %low, %bit;
    .reg .b64 %address, %count, %high, %word;
    ld.param.u64 %address, [flag];
    cvta.to.global.u64 %address, %address;
    ld.volatile.global.u8 %flag, [%address];
    setp.ne.u16 %is_set, %flag, 0;
    selp.b32 %bit, 1, 0, %is_set;
    mov.b32 %low, 0;
    ld.param.u64 %address, [index];
    setp.eq.u64 %no_index, %address, 0;
    @%no_index bra pack;
    cvta.to.global.u64 %address, %address;
    ld.volatile.global.u32 %low, [%address];
    shl.b32 %low, %low, 1;
pack:
    or.b32 %low, %low, %bit;
    cvt.u64.u32 %word, %low;
    ld.param.u64 %address, [count];
    cvta.to.global.u64 %address, %address;
    ld.volatile.global.u64 %count, [%address];
    add.u64 %count, %count, 1;
    st.volatile.global.u64 [%address], %count;
    shl.b64 %high, %count, 32;
    or.b64 %word, %word, %high;
    ld.param.u64 %address, [word];
    cvta.to.global.u64 %address, %address;
    st.release.sys.global.u64 [%address], %word;
    ret;
}

.visible .entry draftgraph_no_op()
.maxntid 1, 1, 1
{
    ret;
}
"""
"""All kernels of this package. PTX 8.4 is that of CUDA 12.4, the first with WHILE nodes."""


@dataclass(frozen=True)
class KernelEntry:
    """The entry point of a kernel and the types of its parameters, in order."""

    name: str
    parameters: tuple[type[ctypes.c_uint64] | type[ctypes.c_uint32], ...] = ()


_U64, _U32 = ctypes.c_uint64, ctypes.c_uint32

ENTRIES: dict[type[Kernel], KernelEntry] = {
    SetWhile: KernelEntry("draftgraph_set_while", (_U64, _U64)),
    SetSwitch: KernelEntry("draftgraph_set_switch", (_U64, _U64, _U32)),
    SetIf: KernelEntry("draftgraph_set_if", (_U64, _U64, _U32)),
    Publish: KernelEntry("draftgraph_publish", (_U64, _U64, _U64, _U64)),
    NoOp: KernelEntry("draftgraph_no_op"),
}


class PackedArguments:
    """A kernel's arguments as the driver wants them: the address of an array of addresses of values.

    It must live until the call that is given `address` has returned; the driver copies the values.
    """

    def __init__(self, kernel: Kernel) -> None:
        parameters = ENTRIES[type(kernel)].parameters
        self.values = tuple(kind(value) for kind, value in zip(parameters, _values(kernel), strict=True))
        self._pointers = (ctypes.c_void_p * max(1, len(self.values)))(*(ctypes.addressof(v) for v in self.values))

    @property
    def address(self) -> int:
        """Address of the array; 0 for a kernel without parameters."""
        return ctypes.addressof(self._pointers) if self.values else 0


def _values(kernel: Kernel) -> tuple[Any, ...]:
    match kernel:
        case SetWhile():
            return int(kernel.handle), kernel.flag.data_ptr()
        case SetSwitch():
            return int(kernel.handle), kernel.index.data_ptr(), kernel.branches
        case SetIf():
            return int(kernel.handle), kernel.index.data_ptr(), kernel.branch
        case Publish():
            index = 0 if kernel.index is None else kernel.index.data_ptr()
            return kernel.flag.data_ptr(), index, kernel.count.data_ptr(), kernel.word.data_ptr()
        case NoOp():
            return ()


def tensors(kernel: Kernel) -> dict[str, torch.Tensor]:
    """The tensors that a kernel reads or writes, by field name."""
    return {name: value for name, value in vars(kernel).items() if isinstance(value, torch.Tensor)}
