"""Every test of this folder has a pool of workspaces of its own."""

from __future__ import annotations

import pytest

from draftgraph.kernels.workspace import WorkspacePool


@pytest.fixture(autouse=True)
def _pool():
    with WorkspacePool():
        yield
