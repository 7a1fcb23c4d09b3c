"""What came of a training run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...model_zoo.json_text import parse_json
from ...model_zoo.training.files import replace_file
from ...model_zoo.training.loop import LOG_NAME, STATE_NAME, Acceptance
from .directory import RESULT_NAME


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """For the table at the end, `--json`, and a run that is asked for again."""

    method: str
    engine_method: str
    """`method` of a speculative config that drafts with it."""
    target: str
    out: str
    reason: str
    """How it ended, see `Trained`."""
    before: Acceptance | None
    """Of the head as it began, on the held-out examples; None where the run's log was lost."""
    after: Acceptance
    """Of the head that lies in `out`, the best."""
    steps: int
    tokens: int
    seconds: float
    examples: int
    """That it was trained on."""
    held_out: int
    parameters: int
    """That learnt."""
    exported_bytes: int
    peak_bytes: int
    peak_device_bytes: int | None
    identity: Mapping[str, Any]
    """Everything that the result depends on."""

    def to_json(self) -> dict[str, Any]:
        """Types that JSON has."""
        return {
            **asdict(self),
            "acceptance_length_before": None if self.before is None else self.before.length,
            "acceptance_length_after": self.after.length,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TrainResult:
        """Reads what `to_json` gave."""
        fields = {name: value[name] for name in cls.__dataclass_fields__}
        for name in ("before", "after"):
            found = value[name]
            fields[name] = None if found is None else Acceptance(found["loss"], tuple(found["rates"]))
        return cls(**fields)


def keep_result(result: TrainResult) -> None:
    """Notes that a run has ended."""
    with replace_file(Path(result.out) / STATE_NAME / RESULT_NAME) as part:
        part.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")


def kept_result(out: Path) -> TrainResult | None:
    """What a run that has ended came to; None if it has not."""
    try:
        return TrainResult.from_json(parse_json((out / STATE_NAME / RESULT_NAME).read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def evaluations(out: Path) -> dict[int, Acceptance]:
    """All evaluations of a run so far, by update, from its log."""
    found = {}
    for line in (out / STATE_NAME / LOG_NAME).read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        if "held_out_length" in entry:
            found[int(entry["step"])] = Acceptance(entry["held_out_loss"], tuple(entry["held_out_rates"]))
    return found
