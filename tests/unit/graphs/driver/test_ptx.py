"""The PTX kernels do, instruction by instruction, what the interpreter of recorded graphs takes them to do."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ptx_machine import Machine, entries

from draftgraph.graphs.driver import interpreter, ptx
from draftgraph.graphs.driver.protocol import Kernel, NoOp, Publish, SetIf, SetSwitch, SetWhile

indices = st.one_of(st.integers(-3, 9), st.integers(-(2**31), 2**31 - 1))


def run(kernel: Kernel) -> Machine:
    """Runs a kernel with the arguments read back from the addresses that the driver would get."""
    entry = ptx.ENTRIES[type(kernel)]
    packed = ptx.PackedArguments(kernel)
    values = []
    for number, kind in enumerate(entry.parameters):
        pointer = ctypes.c_void_p.from_address(packed.address + 8 * number).value
        values.append(kind.from_address(pointer).value)
    return Machine(ptx.MODULE, entry.name, values)


def set_to(kernel: Kernel) -> int:
    """What the interpreter sets the kernel's handle to."""
    launch = interpreter._Launch(None)
    launch._kernel(kernel)
    return launch._set[kernel.handle]


def int32(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


@pytest.mark.parametrize("flag", [False, True])
def test_set_while(flag):
    kernel = SetWhile(0xFEDCBA9876543210, torch.tensor([flag]))
    assert run(kernel).set_to == [(kernel.handle, set_to(kernel))] == [(kernel.handle, int(flag))]


@given(index=indices, branches=st.integers(1, 9))
def test_set_switch(index, branches):
    kernel = SetSwitch(3, int32(index), branches)
    expected = index if 0 <= index < branches else branches
    assert run(kernel).set_to == [(3, set_to(kernel))] == [(3, expected)]


@given(index=indices, branch=st.integers(0, 9))
def test_set_if(index, branch):
    kernel = SetIf(3, int32(index), branch)
    assert run(kernel).set_to == [(3, set_to(kernel))] == [(3, int(index == branch))]


@given(flag=st.booleans(), index=st.none() | indices, count=st.integers(-1, 5) | st.integers(0, 2**63 - 2))
def test_publish(flag, index, count):
    def make() -> Publish:
        at = None if index is None else int32(index)
        return Publish(torch.tensor([flag]), at, torch.tensor([count]), torch.zeros(1, dtype=torch.int64))

    by_machine, by_interpreter = make(), make()
    machine = run(by_machine)
    interpreter._publish(by_interpreter)
    assert int(by_machine.word) == int(by_interpreter.word)
    assert int(by_machine.count) == int(by_interpreter.count) == count + 1
    word = int(by_machine.word) % 2**64
    assert word >> 32 == (count + 1) % 2**32
    assert word & 1 == flag
    assert (word & 0xFFFFFFFF) >> 1 == (0 if index is None else index & 0x7FFFFFFF)
    # The word comes last, and is what other threads' writes must not come after.
    assert machine.stores == ["volatile", "release.sys"]
    assert machine.set_to == []


def test_no_op():
    assert run(NoOp()).set_to == []


def test_every_kernel_has_an_entry_with_the_parameters_that_are_packed():
    found = entries(ptx.MODULE)
    assert {entry.name for entry in ptx.ENTRIES.values()} == set(found)
    assert len(re.findall(r"\.entry", ptx.MODULE)) == len(found)
    for entry in ptx.ENTRIES.values():
        assert [8 * ctypes.sizeof(kind) for kind in entry.parameters] == [bits for _, bits in found[entry.name][0]]


def test_the_module_is_plain_enough_for_old_drivers():
    assert ptx.MODULE.isascii()
    assert ptx.MODULE.startswith(".version 8.4\n.target sm_80\n.address_size 64\n")
    assert ptx.MODULE.count(".extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);") == 1
