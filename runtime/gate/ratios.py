"""The times that the gate compares: steps of a round against a yardstick, and whole answers against each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from ...graphs import compile_region
from ...profiling.gate import Limits
from ...profiling.interleaved import Contender, Times, interleave
from ..sampling_params import SamplingParams
from ..speculative_config import SpeculativeConfig
from .fixed_model import CONFIG, PROMPT, fixed_engine, fixed_weights
from .rig import Rig, make_rig

YARDSTICK, LONG_YARDSTICK = "yardstick", "long yardstick"
TOKENS = 16
"""Of an answer: short, so that now and then one is not interrupted."""
_SETTLED = 9
"""Rounds after which lookup finds drafts, so that the steps have all their work."""
_WIDTH = 8

# Measured on two cores that three other processes kept busy: the short steps kept their ratios within 7%, the verify,
# which reads more memory than its yardstick, within 20%.
_SHORT = Limits(least=0.10, most=0.15)
_LONG = Limits(least=0.30, most=0.40)
_COMPILED = Limits(least=0.15, most=0.20)
_ANSWERS = Limits(least=0.20, most=0.35)

Contest = Mapping[str, Contender]


@dataclass(frozen=True)
class Comparison:
    """A ratio that is gated: the subject's time over the reference's."""

    subject: str
    reference: str
    limits: Limits

    def __str__(self) -> str:
        return f"{self.subject} / {self.reference}"

    def of(self, times: Times) -> float:
        """The ratio."""
        return times.ratio(self.subject, self.reference)


@dataclass(frozen=True)
class Group:
    """Contenders that are timed in turns, and the ratios between them."""

    contest: Contest
    comparisons: tuple[Comparison, ...]
    foreign: tuple[str, ...]
    """Contenders without our code: when their times are the baseline's, the machine is as fast as it was then."""
    blocks: int
    turns: int

    def measure(self) -> Times:
        """Times every contender in turns."""
        return interleave(self.contest, blocks=self.blocks, turns=self.turns)


def yardstick(repeats: int) -> Callable[[], None]:
    """Work that no change to draftgraph changes: small ops, as the host's steps are, and a pass over some logits.

    Its mix is that of the steps which it is compared with, so that a slower clock, a full cache or a busy neighbour
    slow both alike; and so is its length, since a long call is interrupted more often than a short one.
    """
    logits = torch.linspace(-4.0, 4.0, _WIDTH * CONFIG.vocab_size).reshape(_WIDTH, -1)
    small = torch.arange(64, dtype=torch.int32)

    def run() -> None:
        with torch.inference_mode():
            for _ in range(repeats):
                for _ in range(12):
                    small.add(1).clamp_(max=7).sum()
                logits.argmax(dim=-1)
                torch.logsumexp(logits, dim=-1)

    return run


def _step(rig: Rig, name: str, prepare: Callable[[], object] | None = None) -> Contender:
    step, state = rig.step(name), rig.state

    def run() -> None:
        with torch.inference_mode():
            step.fn(state)

    return Contender(run=run, prepare=prepare)


def _uncommitted(rig: Rig) -> Callable[[], None]:
    """Takes a commit back, so that the next one has the same work."""
    length, running = rig.state.length.clone(), rig.state.running.clone()

    def restore() -> None:
        rig.state.length.copy_(length)
        rig.state.running.copy_(running)
        rig.state.finished[:-1] = False

    return restore


@contextmanager
def step_group(*, compiled: bool = True) -> Iterator[Group]:
    """The steps of a round with four n-gram drafts at one row, eager, each against the yardstick.

    Args:
        compiled: also time the compiled verify against the eager one; compiling takes some seconds.
    """
    options = {"method": "ngram", "num_speculative_tokens": 4}
    greedy = make_rig(SpeculativeConfig.parse({**options, "rejection_sample_method": "coupled"}), fixed_weights())
    sampled = make_rig(SpeculativeConfig.parse({**options, "rejection_sample_method": "standard"}), fixed_weights())
    greedy.load(rounds=_SETTLED)
    sampled.load(rounds=_SETTLED, temperature=0.8)
    verify = f"verify[{_WIDTH}]"
    contest = {
        YARDSTICK: Contender(run=yardstick(1)),
        LONG_YARDSTICK: Contender(run=yardstick(5)),
        "propose": _step(greedy, "propose"),
        "budget": _step(greedy, "budget"),
        verify: _step(greedy, verify),
        "accept, greedy": _step(greedy, "accept"),
        "accept, sampled": _step(sampled, "accept"),
        "commit": _step(greedy, "commit", _uncommitted(greedy)),
    }
    comparisons = [
        Comparison("propose", YARDSTICK, _LONG),
        Comparison("budget", YARDSTICK, _LONG),
        Comparison(verify, LONG_YARDSTICK, _LONG),
        Comparison("accept, greedy", YARDSTICK, _SHORT),
        Comparison("accept, sampled", LONG_YARDSTICK, _SHORT),
        Comparison("commit", YARDSTICK, _SHORT),
    ]
    if compiled:
        rig = make_rig(SpeculativeConfig.parse(options), fixed_weights(), compile_region=compile_region)
        rig.copy_from(greedy)
        contest[f"{verify}, compiled"] = _step(rig, verify)
        comparisons.append(Comparison(f"{verify}, compiled", verify, _COMPILED))
    for contender in contest.values():
        contender.seconds()
    yield Group(contest, tuple(comparisons), (YARDSTICK, LONG_YARDSTICK), blocks=15, turns=12)


@contextmanager
def answer_group() -> Iterator[Group]:
    """Whole answers: speculation against plain decoding, and plain decoding against transformers."""
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    prompt = list(PROMPT)
    with ExitStack() as stack:
        plain = stack.enter_context(fixed_engine())
        ngram = stack.enter_context(fixed_engine(SpeculativeConfig(method="ngram", num_speculative_tokens=4)))
        contest = {
            "transformers": Contender(run=transformers_answer(TOKENS)),
            "plain": Contender(run=lambda: plain.generate(prompt, params)),
            "ngram": Contender(run=lambda: ngram.generate(prompt, params)),
        }
        comparisons = (Comparison("ngram", "plain", _ANSWERS), Comparison("plain", "transformers", _ANSWERS))
        for contender in contest.values():
            contender.seconds()
        yield Group(contest, comparisons, ("transformers",), blocks=9, turns=3)


def transformers_answer(tokens: int) -> Callable[[], list[int]]:
    """The fixed model in transformers: answers the fixed prompt with so many tokens, greedily."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=CONFIG.intermediate_size,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        max_position_embeddings=CONFIG.max_position_embeddings,
        rms_norm_eps=CONFIG.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": CONFIG.rope[0][1].theta},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    weights = fixed_weights()
    tensors: dict[str, torch.Tensor] = {}
    query, key = CONFIG.num_heads * CONFIG.head_dim, CONFIG.num_kv_heads * CONFIG.head_dim
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}."
        q, k, v = layer.qkv.split([query, key, key])
        assert layer.gate_up is not None, "the fixed model is dense"
        assert layer.down is not None, "the fixed model is dense"
        assert layer.attention_norm is not None
        gate, up = layer.gate_up.chunk(2)
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": q,
            f"{prefix}self_attn.k_proj.weight": k,
            f"{prefix}self_attn.v_proj.weight": v,
            f"{prefix}self_attn.o_proj.weight": layer.output,
            f"{prefix}mlp.gate_proj.weight": gate,
            f"{prefix}mlp.up_proj.weight": up,
            f"{prefix}mlp.down_proj.weight": layer.down,
            f"{prefix}input_layernorm.weight": layer.attention_norm,
            f"{prefix}post_attention_layernorm.weight": layer.mlp_norm,
        }
    tensors |= {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
        "lm_head.weight": weights.head,
    }
    model.load_state_dict(tensors)
    prompt = torch.tensor([PROMPT])
    mask = torch.ones_like(prompt)
    options = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}

    def run() -> list[int]:
        with torch.no_grad():
            answer: list[int] = model.generate(prompt, attention_mask=mask, **options)[0, len(PROMPT) :].tolist()
        return answer

    return run
