import pytest
import torch

from draftgraph.profiling.gate import Verdict, compare_counts
from draftgraph.runtime.gate import counts as gate_counts
from draftgraph.runtime.gate.counts import answer_counts, byte_counts, program_counts, region_counts
from draftgraph.runtime.gate.fixed_model import uniform
from draftgraph.runtime.gate.ratios import transformers_answer
from draftgraph.runtime.verification.coupled import CoupledVerification


@pytest.fixture(scope="module")
def programs():
    return program_counts()


def failing(before, now):
    return {finding.name: finding.verdict for finding in compare_counts(before, now) if finding.verdict.fails}


def test_programs_are_counted_alike_each_time(programs):
    assert program_counts() == programs
    kernels = {name: count for name, count in programs.items() if name.endswith(": kernels")}
    assert min(kernels.values()) >= 1
    assert (
        programs["ngram 4 standard round[1]: nodes"] == programs["none round[1]: nodes"] + 3
    )  # propose, a width, the switch
    assert {count for name, count in programs.items() if name.endswith("a graph cannot hold")} == {0}


def plant(monkeypatch, extra):
    original = CoupledVerification.judge

    def judge(self, state, bucket):
        original(self, state, bucket)
        extra(state)

    monkeypatch.setattr(CoupledVerification, "judge", judge)


def test_a_planted_launch_is_caught(programs, monkeypatch):
    plant(monkeypatch, lambda state: state.accepted.add_(0))
    now = program_counts()
    planted = [f"ngram 4 coupled round[{bucket}] accept: kernels" for bucket in (1, 4)]
    assert failing(programs, now) == dict.fromkeys(planted, Verdict.CHANGED)
    assert all(now[name] == programs[name] + 1 for name in planted)


def test_a_view_is_no_launch(programs, monkeypatch):
    plant(monkeypatch, lambda state: state.accepted[:1].view(-1))
    assert failing(programs, program_counts()) == {}


def test_a_planted_wait_for_the_device_is_caught(programs, monkeypatch):
    plant(monkeypatch, lambda state: torch.equal(state.accepted, state.length))
    found = failing(programs, program_counts())
    assert found["ngram 4 coupled round[1]: steps a graph cannot hold"] is Verdict.CHANGED


def test_matrix_products_of_the_regions():
    assert region_counts() == {
        "region decoder_layer: matrix products": 4,
        "region rms_norm: matrix products": 0,
    }


def test_least_bytes_of_every_step():
    found = byte_counts()
    assert set(found) == {f"{step}: least bytes" for step in ("propose", "budget", "verify", "accept", "commit")}
    assert min(found.values()) > 0


def test_the_fixed_answer_and_its_rounds():
    found = answer_counts()
    assert found["fixed model, plain: rounds"] == gate_counts.TOKENS
    for rule in gate_counts.RULES:
        label = f"fixed model, ngram 4 {rule}"
        assert found[f"{label}: tokens unlike plain decoding's"] == 0
        rounds, verified, accepted = (
            found[f"{label}: {what}"] for what in ("rounds", "drafts verified", "drafts accepted")
        )
        assert rounds + accepted == gate_counts.TOKENS
        assert 0 < accepted < verified


def test_transformers_gives_the_fixed_models_answer():
    from draftgraph import SamplingParams
    from draftgraph.runtime.gate.fixed_model import PROMPT, fixed_engine

    with fixed_engine() as engine:
        ours = engine.generate(list(PROMPT), SamplingParams(max_tokens=12, ignore_eos=True)).token_ids
    assert tuple(transformers_answer(12)()) == ours


def test_the_weights_are_splitmix64():
    def splitmix64(state):
        state = state * 0x9E3779B97F4A7C15 % 2**64
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        return state ^ (state >> 31)

    for stream in (0, 13):
        expected = [(splitmix64(stream * 2**32 + i) >> 40) / 2**23 - 1 for i in range(1, 7)]
        assert uniform((2, 3), stream, 0.5).flatten().tolist() == [0.5 * value for value in expected]
