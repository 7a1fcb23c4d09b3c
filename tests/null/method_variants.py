"""Every drafting method, with the options that change its steps."""

from __future__ import annotations

from fake_engines import LastToken

from draftgraph.runtime.speculative_config import DRAFT_SAMPLE_METHODS, METHODS

LAST_TOKEN = f"{LastToken.__module__}:{LastToken.__qualname__}"


def available_methods() -> list[str]:
    return [name for name, method in METHODS.items() if method.available]


def variants() -> list[tuple[str | tuple[str, ...], dict[str, object]]]:
    """Every available method, with the options that change its steps."""
    found: list[tuple[str | tuple[str, ...], dict[str, object]]] = []
    for name in available_methods():
        method = METHODS[name]
        options: dict[str, object] = {"model": "some/draft"} if method.needs_model else {}
        if method.exits_early:
            options["exit_layer"] = 1
        if method.user_class:
            options["speculator"] = LAST_TOKEN
        found.append((name, options))
        if method.samples_drafts:
            found.append((name, {**options, "draft_sample_method": "probabilistic"}))
        if method.parallel:
            found.append((name, {**options, "parallel_drafting": True}))
        if method.own_attention:
            found.append((name, {**options, "attention_backend": "reference"}))
        if method.markov:
            found.append((name, {**options, "dspark_draft_topk": 4, "draft_sample_method": "probabilistic"}))
        if method.own_vocabulary:
            found.append((name, {**options, "use_heterogeneous_vocab": True}))
    everything: dict[str, object] = {"model": "some/draft", "exit_layer": 2, "speculator": LAST_TOKEN}
    found.append((("ngram", "custom", "layerskip", "draft_model"), everything))
    found.append((("ngram", "eagle3"), {"model": "some/draft"}))
    found.append((("ngram", "mtp"), {}))
    found += [("mtp", {"model": "some/draft", "draft_sample_method": s}) for s in DRAFT_SAMPLE_METHODS]
    return found


def reads_target(method: str | tuple[str, ...]) -> bool:
    return any(METHODS[name].reads_target for name in ((method,) if isinstance(method, str) else method))


VARYING = [
    {"method": "ngram", "enable_adaptive_verification": True},
    {"method": "medusa", "model": "some/draft", "enable_adaptive_verification": True},
    {"method": "dspark", "model": "some/draft", "enable_adaptive_verification": True},
    *(
        {**method, **budget}
        for method in (
            {"method": "draft_model", "model": "some/draft", "draft_sample_method": "probabilistic"},
            {"method": "layerskip", "exit_layer": 1},
            {"method": "eagle3", "model": "some/draft"},
        )
        for budget in (
            {"enable_adaptive_verification": True},
            {"num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 4, 0]]},
        )
    ),
]
