"""The machine code of `commit` publishes a row after all else of it, to the host too."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from draftgraph.kernels.triton_support import triton

pytestmark = [pytest.mark.compile, pytest.mark.skipif(triton is None, reason="Triton has no build for this machine")]

SCRIPT = """
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from draftgraph.kernels.commit_triton import kernel_specs
for spec in kernel_specs():
    signature = {name: spec.arguments.get(name, "constexpr").partition(":")[0] for name in spec.kernel.arg_names}
    source = ASTSource(spec.kernel, signature, spec.constants)
    print("=====", compile(source, GPUTarget("cuda", 90, 32), {"num_warps": spec.num_warps}).asm["ptx"])
"""


def test_a_row_is_released_after_a_barrier_and_nothing_of_it_is_stored_later():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    kernels = run.stdout.split("=====")[1:]
    assert len(kernels) == 4
    for index, ptx in enumerate(kernels):
        wanted = r"\b(?:st\.global|bar\.sync|atom\.\S+|red\.\S+)"
        order = [match.split(".")[0] for match in re.findall(wanted, ptx)]
        assert order.count("atom") == len(re.findall(r"atom\.global\.sys\.release\.exch\.b64", ptx)) >= 1
        first = order.index("atom")
        assert "bar" in order[:first]
        assert order[first - 1] == "bar"
        # Later only the rounds left and the running flag, which the host does not read. The last specialisation is a
        # loop, whose code is not in its order.
        assert index == 3 or [kind for kind in order[first:] if kind == "st"] == ["st", "st"]
        # What the host writes is read afresh: two flags, and by row `cancel` and `taken`.
        assert len(re.findall(r"ld\.volatile\.global", ptx)) >= 4
