"""No multiply-add is fused in the code of the functions that must give the same bits everywhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from draftgraph.kernels.triton_support import triton

pytestmark = [pytest.mark.compile, pytest.mark.skipif(triton is None, reason="Triton has no build for this machine")]

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from scalar_kernels import elementary_kernel, gumbel_kernel, uniform_kernel
from draftgraph.kernels.compile_report import TARGETS, all_specs, compiled_kernel
from draftgraph.kernels.triton_support import KernelSpec

fusion = sys.argv[2] == "fused"
common = {"op": "test", "shape": "", "bytes_moved": 0, "enable_fp_fusion": fusion}
specs = []
functions = ("log", "negative_log1p_of_negative", "exp", "mass", "log_of_mass")
for function in ("exp",) if fusion else functions:
    kinds = {"x": "*i64" if function == "log_of_mass" else "*fp32", "output": "*i64" if function == "mass" else "*fp32"}
    constants = {"FUNCTION": function, "SIZE": 512}
    specs.append(
        KernelSpec(variant=function, kernel=elementary_kernel, arguments=kinds, constants=constants, **common)
    )
kinds = {"seed": "*i64", "position": "*i32", "output": "*fp32", "first": "i32"}
specs.append(
    KernelSpec(variant="gumbel", kernel=gumbel_kernel, arguments=kinds, constants={"STREAM": 1, "SIZE": 512}, **common)
)
kinds = {"seed": "*i64", "position": "*i32", "output": "*fp32"}
specs.append(KernelSpec(variant="uniform", kernel=uniform_kernel, arguments=kinds, constants={"STREAM": 1}, **common))
texts = {}
for spec in specs[:1] if fusion else specs:
    for target in TARGETS:
        asm = compiled_kernel(spec, target).asm
        if target.startswith("gfx"):
            texts[f"{spec.variant} {target}"] = asm["amdgcn"]
        else:
            texts[f"{spec.variant} {target} ptx"] = asm["ptx"]
            texts[f"{spec.variant} {target} cubin"] = asm["cubin"].hex()
for spec in all_specs() if not fusion else []:
    if not spec.enable_fp_fusion and spec.variant.startswith("bf16, 128256"):
        texts[f"{spec.op} {spec.variant} sm_90 ptx"] = compiled_kernel(spec, "sm_90").asm["ptx"]
json.dump(texts, sys.stdout)
"""
FUSED = re.compile(r"\bfma\.rn|\bmad\.f|\bFFMA|\bv_(pk_)?(fma|mac|mad|fmac|fmamk|fmaak)\w*_f32")


def code(mode):
    """Text of each kernel's code, by kernel, target and form; NVIDIA's machine code disassembled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    folder = str(Path(__file__).parents[1] / "interpret")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:  # Triton wants its kernels' source in files
        script.write(SCRIPT)
        script.flush()
        command = [sys.executable, script.name, folder, mode]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]
    return {
        name: disassemble(text) if name.endswith("cubin") else text for name, text in json.loads(result.stdout).items()
    }


def disassemble(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(bytes.fromhex(cubin))
        file.flush()
        tool = triton.knobs.nvidia.nvdisasm.path
        return subprocess.run([tool, file.name], check=True, capture_output=True, text=True).stdout


def test_nothing_is_fused():
    texts = code("unfused")
    assert len(texts) > 7 * 7 + 15
    # gfx942 converts to int64 with a multiply-add by -2**32, which is exact; `exp` covers the rest of `mass`.
    del texts["mass gfx942"]
    assert {name: FUSED.findall(text) for name, text in texts.items() if FUSED.search(text)} == {}
    # Subnormal numbers are kept, as on the CPU.
    assert [name for name, text in texts.items() if name.endswith("ptx") and ".ftz" in text] == []


def test_the_check_would_notice():
    texts = code("fused")
    fused = {name for name, text in texts.items() if FUSED.search(text)}
    for form in ("sm_80 cubin", "sm_90 cubin", "sm_100 cubin", "gfx942"):
        assert f"exp {form}" in fused
