"""Compiles every specialisation of every kernel for every target, on a machine without a GPU, and reports what it uses.

`python -m draftgraph.kernels.compile_report` prints the table, `--write` puts it into README.md, `--check` compares it
with README.md, `--json FILE` writes the numbers. `--sample` compiles the part that ordinary tests can afford.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from .launch_recorder import Specialization
from .triton_support import INTERPRETED, KernelSpec, triton

OP_FILES: tuple[str, ...] = (
    "accept_block_triton",
    "accept_coupled",
    "accept_standard_triton",
    "accept_synthetic",
    "advance_draft",
    "budget_topk",
    "choose_budget",
    "commit_triton",
    "compact_path",
    "draft_argmax",
    "draft_distribution",
    "draft_positions",
    "drop_unknown_drafts",
    "embed_tokens",
    "estimate_acceptance",
    "gather_rows",
    "gather_window",
    "keep_drafting",
    "keep_prompt_state",
    "keep_ring",
    "keep_states",
    "learn_acceptance",
    "merge_drafts",
    "moe_experts",
    "ngram_propose",
    "pack_block",
    "pack_tail",
    "pack_turn",
    "pack_unseen",
    "pack_window",
    "plan_window",
    "project_logits",
    "put_rows",
    "record_logprobs_triton",
    "residual_triton",
    "rope_and_cache",
    "sample_target_triton",
    "suffix_propose",
    "tokens_after",
    "widen_logits",
    "window_attention",
)
"""Files of this folder that have a `kernel_specs`."""

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one block may have."""
BANDWIDTH = 4.8e12
"""Bytes per second of an H200's memory."""
LAUNCH_SECONDS = 1.3e-6
"""What a kernel costs in a CUDA graph even when it does nothing."""
README = Path(__file__).with_name("README.md")
_BEGIN, _END = "<!-- compile_report: begin -->", "<!-- compile_report: end -->"


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel uses."""

    op: str
    variant: str
    target: str
    registers: int
    """Of one thread: general registers on NVIDIA; vector registers, accumulation ones included, on AMD."""
    spills: int
    """On NVIDIA the bytes of a thread's stack, on AMD its spilled vector registers: 0 when everything fits."""
    shared: int
    """Bytes of a block."""


def all_specs() -> list[KernelSpec]:
    """Every specialisation of every op."""
    specs: list[KernelSpec] = []
    for name in OP_FILES:
        specs += importlib.import_module(f".{name}", __package__).kernel_specs()
    return specs


def compile_spec(spec: KernelSpec, target: str) -> Usage:
    """Compiles one specialisation to machine code and reads what it uses; see `compiled_kernel` for the errors."""
    return usage_of(compiled_kernel(spec, target), spec.op, spec.variant, target)


def usage_of(compiled: Any, op: str, variant: str, target: str) -> Usage:
    """Reads what a compiled kernel uses."""
    if target.startswith("gfx"):
        registers, spills = _amd_usage(compiled.asm["amdgcn"])
    else:
        registers, spills = _nvidia_usage(compiled.asm["cubin"])
    return Usage(op, variant, target, registers, spills, compiled.metadata.shared)


def compiled_kernel(spec: KernelSpec, target: str) -> Any:
    """Triton's compiled kernel of one specialisation, whose `asm` has the text of every stage.

    Raises:
        RuntimeError: this process interprets kernels, so it cannot compile them.
    """
    return compile_specialization(specialization_of(spec, target), target)


def specialization_of(spec: KernelSpec, target: str) -> Specialization:
    """What a launch of the spec is compiled for, with pointers aligned and into less than 2 GiB."""
    names, amd = spec.kernel.arg_names, target.startswith("gfx")
    unknown = (set(spec.arguments) | set(spec.constants)) - set(names)
    missing = set(names) - set(spec.arguments) - set(spec.constants)
    if unknown or missing:
        raise ValueError(f"{spec.op} {spec.variant}: unknown arguments {unknown}, missing arguments {missing}")
    signature = []
    for name in names:
        kind, _, multiple = spec.arguments.get(name, "constexpr").partition(":")
        pointer = kind.startswith("*")
        signature.append((name, kind, ("DS" if amd else "D") if pointer else "D" if multiple else ""))
    options: dict[str, Any] = {
        "num_warps": spec.hip_num_warps or spec.num_warps if amd else spec.num_warps,
        "num_stages": spec.num_stages,
        "enable_fp_fusion": spec.enable_fp_fusion,
    }
    if not amd:
        options["maxnreg"] = spec.maxnreg
    return Specialization(
        kernel=f"{spec.kernel.fn.__module__}:{spec.kernel.fn.__name__}",
        signature=tuple(signature),
        constants=tuple((name, spec.constants[name]) for name in names if name in spec.constants),
        options=tuple(sorted(options.items())),
    )


def compile_specialization(specialization: Specialization, target: str) -> Any:
    """Triton's compiled kernel of what a launch asked for.

    Raises:
        RuntimeError: this process interprets kernels, so it cannot compile them.
    """
    if INTERPRETED:
        raise RuntimeError("kernels cannot be compiled in a process that runs with TRITON_INTERPRET=1")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    gpu = GPUTarget("hip", target, 64) if target.startswith("gfx") else GPUTarget("cuda", int(target[3:]), 32)
    backend = make_backend(gpu)
    module, _, name = specialization.kernel.partition(":")
    source = ASTSource(
        getattr(importlib.import_module(module), name),
        {name: kind for name, kind, _ in specialization.signature},
        dict(specialization.constants),
        {
            (index,): backend.parse_attr(marks)
            for index, (_, kind, marks) in enumerate(specialization.signature)
            if kind != "constexpr"
        },
    )
    return triton.compile(source, target=gpu, options=dict(specialization.options))


def _compile_job(job: tuple[Specialization, str, str, str]) -> Usage:
    specialization, op, variant, target = job
    return usage_of(compile_specialization(specialization, target), op, variant, target)


def compile_jobs(jobs: Sequence[tuple[Specialization, str, str, str]], processes: int = 2) -> list[Usage]:
    """Compiles specialisations, each with its op's name, its own and a target, and reads what they use, in order."""
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(_compile_job, jobs, chunksize=4))


def _amd_usage(assembly: str) -> tuple[int, int]:
    fields = dict(re.findall(r"\.(agpr_count|vgpr_count|vgpr_spill_count):\s*(\d+)", assembly))
    return int(fields["vgpr_count"]), int(fields["vgpr_spill_count"])


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    if match is None:
        raise RuntimeError(f"cannot read the resources of a kernel from {text!r}")
    return int(match[1]), int(match[2]) + int(match[3])


def compile_all(*, sample: bool = False, processes: int | None = None) -> list[Usage]:
    """Compiles everything, in the order of the specs and, within a spec, of the targets.

    Args:
        sample: of every third specialisation one target, each target in turn.
        processes: to compile in; by default one for each core.
    """
    specs = list(enumerate(all_specs()))
    chosen = [
        (spec, target)
        for number, spec in (specs[::3] if sample else specs)
        for target in ((TARGETS[number // 3 % len(TARGETS)],) if sample else TARGETS)
    ]
    jobs = [(specialization_of(spec, target), spec.op, spec.variant, target) for spec, target in chosen]
    return compile_jobs(jobs, processes or os.cpu_count() or 1)


def cell_of(usage: Usage) -> str:
    """How the table writes it."""
    return f"{usage.registers}/{usage.spills}/{usage.shared}"


def render_table(usages: Sequence[Usage]) -> str:
    """The table of README.md: one line per specialisation, `registers/spills/shared` per target."""
    lines = [
        f"With Triton {triton.__version__}:",
        "",
        f"| op | specialisation | {' | '.join(TARGETS)} | must move | at | floor, us |",
        f"| --- | --- | {' | '.join('---' for _ in TARGETS)} | --- | --- | --- |",
    ]
    by_key = {(u.op, u.variant, u.target): u for u in usages}
    for spec in all_specs():
        cells = []
        for target in TARGETS:
            cells.append(cell_of(by_key[spec.op, spec.variant, target]))
        lines.append(f"| {' | '.join([spec.op, spec.variant, *cells, *least_of(spec)])} |")
    return "\n".join(lines)


def least_of(spec: KernelSpec) -> tuple[str, str, str]:
    """What a launch must move at least, at which shape, and in which time."""
    floor = 1e6 * (spec.bytes_moved / BANDWIDTH + LAUNCH_SECONDS)
    return f"{spec.bytes_moved / 1e6:.3g} MB", spec.shape, f"{floor:.1f}"


def readme_table() -> str:
    """The table that README.md holds."""
    text = README.read_text(encoding="utf-8")
    return text.split(_BEGIN, 1)[1].split(_END, 1)[0].strip()


def readme_rows() -> dict[tuple[str, str], list[str]]:
    """The other cells of each of its lines, by op and specialisation."""
    lines = [line.strip("| ").split(" | ") for line in readme_table().splitlines() if line.startswith("| ")]
    return {(op, variant): cells for op, variant, *cells in lines[2:]}


def write_readme(table: str) -> None:
    """Puts the table in README.md's place for it."""
    text = README.read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN, 1)
    after = rest.split(_END, 1)[1]
    README.write_text(f"{before}{_BEGIN}\n{table}\n{_END}{after}", encoding="utf-8")


def _check(usages: Sequence[Usage]) -> int:
    """Compares README.md with what was compiled, and that with the budgets; the process's exit status."""
    specs = {(spec.op, spec.variant): spec for spec in all_specs()}
    wrong = [usage for usage in usages if over_budget(usage, specs[usage.op, usage.variant])]
    for usage in wrong:
        print(f"over its budget: {usage}")
    same = readme_table() == render_table(usages)
    if not same:
        print("kernels/README.md has another table: run `python -m draftgraph.kernels.compile_report --write`")
    print(f"{len(usages)} kernels, {len(wrong)} over budget")
    return 0 if same and not wrong else 1


def over_budget(usage: Usage, spec: KernelSpec) -> bool:
    """Whether a kernel spills or uses more than its file allows it, or than the target has."""
    shared = min(spec.max_shared, SHARED_LIMITS[usage.target])
    return usage.spills > 0 or usage.registers > spec.max_registers or usage.shared > shared


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its result is the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="put the table into kernels/README.md")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument("--check", action="store_true", help="fail where kernels/README.md says otherwise")
    parser.add_argument("--sample", action="store_true", help="compile only a part; goes with --json")
    options = parser.parse_args(arguments)
    if options.sample and options.json is None:
        parser.error("--sample needs --json FILE: the table holds everything")
    usages = compile_all(sample=options.sample)
    if options.json is not None:
        rows: list[dict[str, Any]] = [asdict(usage) for usage in usages]
        options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    if options.sample:
        return 0
    if options.write:
        write_readme(render_table(usages))
    elif options.check:
        return _check(usages)
    elif options.json is None:
        print(render_table(usages))
    return 0


if __name__ == "__main__":
    sys.exit(main())
