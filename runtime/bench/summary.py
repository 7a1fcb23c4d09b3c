"""The figures that are quoted of a bench, as Markdown: one table per prompt set, one row per method."""

from __future__ import annotations

from .report import BenchReport, MethodReport, plain_peer
from .tables import NOTHING, number, positions, verdict


def markdown(report: BenchReport) -> str:
    """The tables. Speed-ups are of all tokens of a set over the wall time of all its answers, end to end."""
    parts = [_about(report)]
    for name in dict.fromkeys(name for one in report.methods for name in one.by_set):
        parts.append("\n".join(_table(report, name)))
    return "\n\n".join(parts) + "\n"


def _about(report: BenchReport) -> str:
    settings, machine = report.settings, report.machine
    shape = ", every width alike (`--exact`)" if settings.get("exact") else ""
    partial = "PARTIAL: it was interrupted. " if report.partial else ""
    return (
        f"{partial}{settings['model']} ({settings['source']}), {settings['dtype']}{shape}, temperature "
        f"{settings['temperature']:g}, at most {settings['max_tokens']} tokens, repeats: {settings['repeats']}; "
        f"{machine['device_name']}, {machine['threads']} threads, PyTorch {machine['torch']}."
    )


def _table(report: BenchReport, name: str) -> list[str]:
    methods = [one for one in report.methods if name in one.by_set]
    peer_method = plain_peer([one.method for one in report.methods])
    peer = next((one for one in methods if one.method is peer_method), None)
    heads = [f"{name}, {methods[0].by_set[name].compared_prompts} prompts", "tokens/s", "against plain"]
    if peer is not None:
        heads.append(f"against {peer.method.name}")
    heads += ["tokens per round", "accepted at position 1, 2, ...", "same text"]
    lines = ["| " + " | ".join(heads) + " |", "| --- |" + " --- |" * (len(heads) - 1)]
    for one in methods:
        figures = one.by_set[name]
        cells = [one.method.name, number(figures.tokens_per_second, ".1f"), _ratio(one, methods[0], name)]
        if peer is not None:
            cells.append(_ratio(one, peer, name))
        cells += [
            number(figures.tokens_per_round, ".2f"),
            positions(figures.acceptance_by_position),
            verdict(one.method, figures, rounding_may_differ=report.rounding_may_differ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _ratio(one: MethodReport, other: MethodReport, name: str) -> str:
    """How many times as many tokens per second."""
    mine, theirs = one.by_set[name].tokens_per_second, other.by_set[name].tokens_per_second
    return number(mine / theirs, ".2f", " x") if mine and theirs and one is not other else NOTHING
