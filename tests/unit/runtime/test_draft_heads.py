"""Draft heads that read the target: their drafts equal the plain mathematics, and change nothing of the output."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import build_tokenizer
from draft_heads import Draft, build_target, drafted, eagle, eagle3, medusa

from draftgraph import Engine, SamplingParams
from draftgraph.graphs import HostExecutor, Program, While
from draftgraph.profiling.floor import RoundShape
from draftgraph.runtime.speculators.target_states import side_by_side

HEADS = {
    "eagle": lambda vocab: eagle(vocab),
    "eagle, biases, wrapped, own embedding": lambda vocab: eagle(vocab, bias=True, wrapped=True, own=True),
    "eagle3": lambda vocab: eagle3(vocab),
    "eagle3, reduced vocabulary, numbered by layers": lambda vocab: eagle3(
        vocab, draft_vocab=60, nested_ids=[0, 3, 5], norm_before_residual=True
    ),
    "eagle3, speculators, two Qwen3 layers": lambda vocab: eagle3(
        vocab, speculators=True, draft_vocab=60, layers=2, qwen=True, ids=[1, 4, 6], own=True
    ),
    "eagle3.1": lambda vocab: eagle3(vocab, speculators=True, fc_norm=True, norm_output=True, ids=[2, 5]),
    "eagle3, one norm over all": lambda vocab: eagle3(
        vocab, speculators=True, input_norm=True, norm_before_residual=False
    ),
    "p-eagle": lambda vocab: eagle3(vocab, parallel=True),
    "p-eagle, reduced vocabulary": lambda vocab: eagle3(vocab, parallel=True, draft_vocab=60, speculators=True),
    "medusa": lambda vocab: medusa(vocab),
    "medusa, blocks": lambda vocab: medusa(vocab, blocks=True, size=60, layers=2),
    "medusa, blocks, all tokens": lambda vocab: medusa(vocab, blocks=True),
}
BRIEF = ["eagle", "eagle3, reduced vocabulary, numbered by layers", "p-eagle", "medusa"]
"""One of each kind."""


class Lab:
    """A target on disk and in transformers, draft heads for it, and engines."""

    def __init__(self, path: Path, heads: dict[str, Callable[[int], Draft]] = HEADS) -> None:
        tokenizer = build_tokenizer()
        self._makers = heads
        self.path, self.vocab = path, len(tokenizer)
        self.model = build_target(path / "target", tokenizer)
        self.tensors = {name: p.data for name, p in self.model.named_parameters()}
        self._heads: dict[str, Draft] = {}
        self._plain: dict[Any, Any] = {}
        texts = ["one two three, one two three, one", "The steam engine", "a", "def add(a, b):\n    return"]
        self.prompts = [tokenizer(text)["input_ids"] for text in texts]
        self.prompts.append(tokenizer("The steam engine changed how people worked. " * 14)["input_ids"])
        assert len(self.prompts[-1]) > 256, "longer than a prefill chunk"
        assert len(self.prompts[2]) == 1, "nothing to prefill"

    def head(self, name: str) -> Draft:
        if name not in self._heads:
            self._heads[name] = self._makers[name](self.vocab)
            self._heads[name].save(self.path / name)
        return self._heads[name]

    def spec(self, name: str, depth: int | None, **options: Any) -> dict[str, Any]:
        head = self.head(name)
        return {**head.spec, "model": str(self.path / name), "num_speculative_tokens": depth, **options}

    def engine(self, spec: dict[str, Any] | None, **options: Any) -> Engine:
        options = {"dtype": "float32", "compile": False, "max_model_len": 512, "max_batch_size": 2, **options}
        return Engine.from_pretrained(self.path / "target", spec, **options)

    def plain(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Plain decoding's tokens of every prompt."""
        if params not in self._plain:
            with self.engine({"method": "none", "rejection_sample_method": "coupled"}, max_batch_size=1) as engine:
                self._plain[params] = [r.token_ids for r in engine.generate(self.prompts, params)]
        return self._plain[params]

    def states(self, tokens: list[int], layers: tuple[int, ...]) -> list[torch.Tensor]:
        with torch.no_grad():
            states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        return [states[layer][0] for layer in layers]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("heads"))


def record_proposals(engine: Engine) -> list[tuple[list[int], list[int], list[torch.Tensor]]]:
    """Makes the engine's drafter tell, of every row and round, the tokens before, its drafts and their logits."""
    core = engine._core
    speculator, state = core._speculator, core.state
    propose, draft = speculator.propose, speculator._chooser.draft
    found: list[tuple[list[int], list[int], list[torch.Tensor]]] = []
    logits: list[torch.Tensor] = []

    def chooser_draft(s, step, values, *rest, **options):
        logits.append(values.clone())
        draft(s, step, values, *rest, **options)

    def recorded(s, bucket):
        logits.clear()
        propose(s, bucket)
        for row, slot in enumerate(s.slot_of_row[:bucket].tolist()):
            count = int(s.draft_count[slot])
            if s.finished[slot] or count == 0:
                continue
            tokens = s.tokens[slot, : s.length[slot]].tolist()
            found.append((tokens, s.draft_tokens[slot, :count].tolist(), [values[row] for values in logits[:count]]))

    speculator._chooser.draft = chooser_draft
    speculator.propose = recorded
    assert state is not None
    return found


@pytest.mark.parametrize("name", HEADS)
def test_drafts_equal_the_plain_mathematics_after_any_acceptance(lab, name):
    """Synthetic acceptance leaves 0 to K drafts standing, so that KV, positions and shifts meet every case."""
    depth = 4
    spec = lab.spec(name, depth, rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.8, 0.6, 0.5, 0.4])
    head = lab.head(name)
    with lab.engine(spec, metrics="detailed") as engine:
        found = record_proposals(engine)
        params = SamplingParams(max_tokens=14, ignore_eos=True, seed=5)
        results = engine.generate(lab.prompts, params)
        # A prompt that shares its beginning with what a slot still holds, the answer included.
        first = engine.generate(lab.prompts[0], params)
        again = [*lab.prompts[0], *first.token_ids, 5, 6]
        reusing = engine.generate(again, SamplingParams(max_tokens=4, ignore_eos=True))
    assert reusing.metrics.reused_prompt_tokens > 0
    accepted = {pair[1] for r in results for pair in r.metrics.round_pairs}
    assert accepted >= {0, 1, depth}, "the test needs every kind of round"
    assert len(found) > 20
    for tokens, drafts, logits in found:
        hidden = lab.states(tokens[:-1], head.states)
        expected = head.drafts(head, lab.tensors, tokens, hidden, depth)[: len(drafts)]
        for step, (ours, theirs) in enumerate(zip(logits, expected, strict=True)):
            torch.testing.assert_close(
                ours, theirs, rtol=2e-3, atol=2e-3, msg=f"draft {step} after {len(tokens)} tokens"
            )
        assert drafts == [drafted(head, values) for values in expected]


@pytest.mark.parametrize(("place", "name"), list(enumerate(HEADS)))
def test_coupled_output_is_plain_decodings(lab, place, name):
    """Each layout at another K of 1 to 7 and another bucket, so that all of them occur."""
    depth, batch = place % 7 + 1, (1, 2, 4)[place % 3]
    greedy = SamplingParams(max_tokens=12, ignore_eos=True)
    first = lab.plain(greedy)[0]
    stopped = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=[first[7]])
    warm = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=4)
    sampling = "probabilistic" if place % 2 else "greedy"
    spec = lab.spec(name, depth, rejection_sample_method="coupled", draft_sample_method=sampling)
    with lab.engine(spec, max_batch_size=batch) as engine:
        for params in (greedy, stopped, warm):
            results = engine.generate(lab.prompts, params)
            assert [r.token_ids for r in results] == lab.plain(params)
            assert sum(r.metrics.proposed_tokens for r in results) > 0
    assert len(lab.plain(stopped)[0]) <= 8


@pytest.mark.parametrize("name", ["eagle", "medusa"])
def test_the_last_hidden_states_are_taken_as_the_target_returns_them(lab, name):
    with lab.engine(lab.spec(name, 2)) as engine:
        core = engine._core
        model, speculator = core._builder._model, core._speculator
        returned, seen = [], []
        forward, observe, prompt = model.forward_with_aux, speculator.observe, speculator.observe_prompt

        def forward_with_aux(*arguments):
            returned.append(forward(*arguments))
            return returned[-1]

        def note(method):
            def noted(state, window, states):
                seen.append(states)
                method(state, window, states)

            return noted

        model.forward_with_aux = forward_with_aux
        speculator.observe, speculator.observe_prompt = note(observe), note(prompt)
        engine.generate(lab.prompts[:2], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(seen) == len(returned) > 3
    for (hidden, _), states in zip(returned, seen, strict=True):
        assert len(states) == 1
        assert states[0] is hidden, "no gather"
        assert side_by_side(states) is hidden


class ExtraRounds(HostExecutor):
    """Runs the round of a loop that has ended once more, whose outcome is dropped, as a late host would."""

    extra = 0

    def rounds(self, program: Program) -> Generator[None, None, None]:
        try:
            yield from super().rounds(program)
        finally:
            assert isinstance(program.root, While)
            if not program.state.running:  # else it is left in the middle, for a smaller bucket
                self.extra += 1
                self.run(Program("extra", program.root.body, program.state))


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["extra rounds", "loop", "loop worker", "round worker"])
@pytest.mark.parametrize("name", BRIEF)
def test_drafts_do_not_depend_on_the_executor(lab, name, executor):
    """Synthetic acceptance emits drafts, so the text tells them all; rows join and leave, loops end with rows under
    way, and graphs are captured in the middle of requests."""
    from test_executor_identity import engine_with, make

    spec = lab.spec(name, 4, rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.8, 0.6, 0.5, 0.4])
    params = SamplingParams(max_tokens=14, ignore_eos=True, seed=5)
    texts = []
    for kind, limits in (("host", {}), (executor, {"ring": 11, "rounds_per_launch": 3})):
        options = {"max_batch_size": 2, "max_model_len": 512, **limits}
        made = ExtraRounds() if kind == "extra rounds" else make(kind)
        with engine_with(lab.path / "target", made, spec, **options) as engine:
            texts.append([r.token_ids for r in engine.generate(lab.prompts, params)])
    assert texts[0] == texts[1]
    assert not isinstance(made, ExtraRounds) or made.extra > 3


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        # Of the layer, the projection, the rest of queries, keys and values, and the head, by how often each is read.
        ("eagle", [(4, "layer"), (4, 2 * 32 * 32), (4, 32 * 320)]),
        ("eagle3", [(4, "layer"), (1, 3 * 32 * 32), (4, 64 * 32), (4, 32 * 320)]),
        ("p-eagle", [(1, "layer"), (1, 3 * 32 * 32), (1, 64 * 32), (1, 32 * 320)]),
        ("medusa", [(4, 32 * 32), (4, 32 * 320)]),
    ],
)
def test_the_floor_of_a_step_counts_its_weights(lab, name, elements):
    assert lab.vocab == 320
    layer = (32 + 2 * 16 + 32) * 32 + 3 * 32 * 48
    with lab.engine(lab.spec(name, 4)) as engine:
        cost = engine._core.propose_cost(RoundShape(rows=1, width=8, window=5, context=100, num_drafts=4))
    least = 4 * sum(times * (layer if size == "layer" else size) for times, size in elements)
    # Besides: norms, embeddings and the cache.
    assert least <= cost.bytes_read <= least + 4 * 4 * (2 * 2 * 16 * 100 + 1000)
    assert cost.operations >= least / 2
