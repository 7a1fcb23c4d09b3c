"""The PTX kernels of graphs/ assemble for every NVIDIA target, and nothing spills."""

from __future__ import annotations

import re
import subprocess

import pytest

from draftgraph.graphs.driver import ptx
from draftgraph.kernels.triton_support import triton

pytestmark = [pytest.mark.compile, pytest.mark.skipif(triton is None, reason="Triton has no build for this machine")]


def assembler(target: str) -> str:
    tools = triton.knobs.nvidia
    return (tools.ptxas_blackwell if target == "sm_100" else tools.ptxas).path


def assemble(module: str, target: str, folder) -> subprocess.CompletedProcess[str]:
    source = folder / "module.ptx"
    source.write_text(module, encoding="ascii")
    # -c: the driver supplies cudaGraphSetConditional when it loads the module.
    command = [assembler(target), "-c", "-v", "-arch", target, str(source), "-o", str(folder / "module.o")]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_module_assembles_without_spills(target, tmp_path):
    result = assemble(ptx.MODULE, target, tmp_path)
    assert result.returncode == 0, result.stderr
    text = result.stdout + result.stderr
    assert set(re.findall(r"Compiling entry function '(\w+)'", text)) == {e.name for e in ptx.ENTRIES.values()}
    used = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    assert used == [("0", "0", "0")] * len(ptx.ENTRIES)
    assert max(int(count) for count in re.findall(r"Used (\d+) registers", text)) <= 32
    assert (tmp_path / "module.o").stat().st_size > 0


def test_a_broken_module_is_noticed(tmp_path):
    assert assemble(ptx.MODULE.replace("min.u32", "min.nothing"), "sm_90", tmp_path).returncode != 0
