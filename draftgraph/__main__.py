"""`python -m draftgraph`."""

from .runtime.cli import main

main()
