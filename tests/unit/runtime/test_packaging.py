import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("runtime", "graphs", "kernels", "model_zoo", "profiling")
HEADS = ROOT / "model_zoo" / "heads"
HEAD_FILES = ("config.json", "head.json", "model.safetensors")
SMALL_HEAD = "a-model/a_method"
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "draftgraph", *FOLDERS)


def run(*command, **options):
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, since building writes beside them."""
    sources = tmp_path_factory.mktemp("sources")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            # Weights take long to pack: empty files stand for them.
            ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "*.jsonl.gz")
            shutil.copytree(ROOT / name, sources / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, sources / name)
    for head in heads():
        directory = sources / "model_zoo" / "heads" / head
        directory.mkdir(parents=True, exist_ok=True)
        for file in HEAD_FILES:
            (directory / file).touch()
        (directory.parent / "answers.jsonl.gz").touch()
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(out), str(sources))
    (built,) = out.glob("*.whl")
    return built


def heads():
    """Of the trained heads, and of one that is made up, the folders below `model_zoo/heads`."""
    return [SMALL_HEAD, *(str(file.parent.relative_to(HEADS)) for file in HEADS.glob("*/*/config.json"))]


def module_files():
    """Every module's path inside the wheel."""
    files = {f"draftgraph/{path.name}" for path in (ROOT / "draftgraph").glob("*.py")}
    for folder in FOLDERS:
        files |= {f"draftgraph/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    return files


def test_every_module_is_in_the_wheel(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = module_files()
    assert "draftgraph/runtime/cli.py" in modules
    assert modules - names == set()
    assert {name for name in names if name.endswith(".py")} == modules
    assert "draftgraph/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert b"draftgraph = draftgraph.runtime.cli:main" in zipfile.ZipFile(wheel).read(entry_points)


def test_trained_heads_are_in_the_wheel_and_what_they_were_trained_on_is_not(wheel):
    names = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("draftgraph/model_zoo/heads/")}
    assert names == {f"draftgraph/model_zoo/heads/{head}/{file}" for head in heads() for file in HEAD_FILES}


def test_the_installed_wheel_imports(wheel, tmp_path):
    target = tmp_path / "site"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index")
    run(*pip, "--no-deps", "--target", str(target), str(wheel))
    names = sorted(
        name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in module_files()
        if not name.endswith("__main__.py")
    )
    script = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    module = importlib.import_module(name)\n"
        f"    assert module.__file__.startswith({str(target)!r}), module.__file__\n"
        "print(len(sys.modules) > 0)"
    )
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": str(target)}
    assert run(sys.executable, "-c", script, env=environment, cwd=tmp_path).strip() == "True"
