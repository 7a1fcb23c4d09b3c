"""Runs each file of this folder in a process of its own with TRITON_INTERPRET=1, which Triton reads at import.

`pytest` therefore runs them on any machine. In a process that has the variable set they are ordinary test files.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from draftgraph.kernels.triton_support import INTERPRETED, triton
from draftgraph.kernels.workspace import WorkspacePool

TIMEOUT_SECONDS = 600


class InterpretedItem(pytest.Item):
    def runtest(self):
        if triton is None:
            pytest.skip("Triton has no build for this machine")
        command = [sys.executable, "-m", "pytest", "-q", "--no-header", str(self.path)]
        result = subprocess.run(
            command,
            env={**os.environ, "TRITON_INTERPRET": "1"},
            cwd=self.config.rootpath,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        if result.returncode != 0:
            raise InterpretedError(result.stdout + result.stderr)

    def repr_failure(self, excinfo, style=None):
        if isinstance(excinfo.value, InterpretedError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, None, f"{self.path.name} under TRITON_INTERPRET=1"


class InterpretedError(Exception):
    """The tests failed in the other process; holds what it printed."""


class InterpretedFile(pytest.File):
    def collect(self):
        yield InterpretedItem.from_parent(self, name="under_the_interpreter")


def pytest_pycollect_makemodule(module_path, parent):
    if INTERPRETED:
        return None
    return InterpretedFile.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def _pool():
    with WorkspacePool():
        yield
