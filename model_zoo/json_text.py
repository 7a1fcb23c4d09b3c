"""JSON that a user or a killed process wrote, and that may be anything."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value that a text stands for.

    Raises:
        ValueError: it is no JSON, or its lists and objects lie too deep within each other to be read.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists and objects lie too deep within each other") from None
