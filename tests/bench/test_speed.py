"""Speed on SmolLM2-135M in bfloat16, as ratios inside one run: against transformers, and against our own plain.

pytest tests/bench --benchmark-enable
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from draftgraph import Engine, SamplingParams
from draftgraph.runtime.cli_demo import PROMPT

pytestmark = [pytest.mark.bench, pytest.mark.models]

ROUNDS = 7
TOKENS = 96
WEIGHT_BYTES = 2 * 134_515_008
"""What one pass reads: SmolLM2-135M's weights in bfloat16, the tied table once, as the head."""


@dataclass
class Contender:
    """Something that answers the echo prompt, and how fast it was each time."""

    run: Callable[[], int]
    rounds: Callable[[], int] | None = None
    """Passes over the weights of one answer, prefill included; None where it is not known."""
    rates: list[float] = field(default_factory=list)

    def measure(self) -> None:
        start = time.perf_counter()
        tokens = self.run()
        self.rates.append(tokens / (time.perf_counter() - start))

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


def read_bandwidth() -> float:
    """Bytes per second at which this machine reads memory: a sum over 512 MB, the best of 5."""
    values = torch.ones(128 * 2**20)
    values.sum()
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        values.sum()
        best = max(best, values.numel() * 4 / (time.perf_counter() - start))
    return best


@pytest.fixture(scope="module")
def bandwidth() -> float:
    return read_bandwidth()


@pytest.fixture(scope="module")
def contenders(smollm2_path):
    """transformers and this engine, plain and with prompt lookup of 8 tokens, measured in turns in one process."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], tokenize=False, add_generation_prompt=True
    )
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.bfloat16).eval()
    options = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}

    def transformers(**extra: int) -> Callable[[], int]:
        def run() -> int:
            with torch.no_grad():
                out = model.generate(
                    torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), **options, **extra
                )
            return out.shape[1] - len(ids)

        return run

    common = {"dtype": "bfloat16", "max_batch_size": 1, "max_model_len": 1024, "prefix_caching": False}
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with (
            Engine.from_pretrained(smollm2_path, **common) as plain,
            Engine.from_pretrained(smollm2_path, {"method": "ngram", "num_speculative_tokens": 8}, **common) as ngram,
        ):
            plain.warmup()
            ngram.warmup()
            found = {
                "transformers plain": Contender(transformers()),
                "plain": Contender(
                    lambda: len(plain.generate(ids, params).token_ids),
                    lambda: plain.generate(ids, params).metrics.rounds,
                ),
                "transformers prompt lookup": Contender(transformers(prompt_lookup_num_tokens=8)),
                "ngram": Contender(
                    lambda: len(ngram.generate(ids, params).token_ids),
                    lambda: ngram.generate(ids, params).metrics.rounds,
                ),
            }
            for contender in found.values():
                contender.run()
            for _ in range(ROUNDS):
                for contender in found.values():
                    contender.measure()
            yield found
    finally:
        torch.set_num_threads(threads)


def report(benchmark, contenders: dict[str, Contender], bandwidth: float, fast: str, slow: str, least: float) -> None:
    ratio = statistics.median(a / b for a, b in zip(contenders[fast].rates, contenders[slow].rates, strict=True))
    benchmark.extra_info.update({name: round(c.rate, 1) for name, c in contenders.items()}, ratio=round(ratio, 2))
    print(f"\n{fast} / {slow}: {ratio:.2f} (at least {least}); tokens/s: {benchmark.extra_info}")
    # Rounds only: the prefill's passes would make the figure larger.
    contender = contenders[fast]
    moved = contender.rounds() * WEIGHT_BYTES * contender.rate / TOKENS
    print(f"{fast}: {moved / 1e9:.1f} GB/s of weights, {moved / bandwidth:.0%} of the {bandwidth / 1e9:.1f} GB/s read")
    assert ratio >= least


def test_plain_beats_transformers_plain(benchmark, contenders, bandwidth):
    benchmark.pedantic(contenders["plain"].run, rounds=1)
    report(benchmark, contenders, bandwidth, "plain", "transformers plain", 1.2)


def test_ngram_beats_transformers_prompt_lookup(benchmark, contenders, bandwidth):
    benchmark.pedantic(contenders["ngram"].run, rounds=1)
    report(benchmark, contenders, bandwidth, "ngram", "transformers prompt lookup", 1.2)


def test_ngram_on_an_echo_beats_plain(benchmark, contenders, bandwidth):
    benchmark.pedantic(contenders["ngram"].run, rounds=1)
    report(benchmark, contenders, bandwidth, "ngram", "plain", 3.5)
