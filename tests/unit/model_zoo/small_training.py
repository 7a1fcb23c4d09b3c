"""A tiny target, heads that learn from it, and the same heads as the engine loads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import pack

from draftgraph.model_zoo.checkpoint import load_model
from draftgraph.model_zoo.decoder import DecoderModel
from draftgraph.model_zoo.dflash.training import DFlashOptions, DFlashTrainee
from draftgraph.model_zoo.draft_checkpoint import load_head, open_draft
from draftgraph.model_zoo.dspark.training import DSparkOptions, DSparkTrainee
from draftgraph.model_zoo.eagle3.parallel_training import ParallelEagle3Options, ParallelEagle3Trainee
from draftgraph.model_zoo.eagle3.training import Eagle3Options, Eagle3Trainee
from draftgraph.model_zoo.medusa.training import MedusaOptions, MedusaTrainee
from draftgraph.model_zoo.mtp.training import MtpOptions, MtpTrainee
from draftgraph.model_zoo.training.batch import TrainingBatch
from draftgraph.model_zoo.training.draft_vocabulary import DraftVocabulary
from draftgraph.model_zoo.training.examples import Example
from draftgraph.model_zoo.training.export import export_head
from draftgraph.model_zoo.training.target import FrozenTarget
from draftgraph.model_zoo.training.trainee import Trainee

VOCAB, HIDDEN, LAYERS, CONTEXT, DRAFTS = 90, 32, 3, 64, 3
DRAFTABLE = torch.tensor([token for token in range(VOCAB) if token % 3])
"""The tokens of the target's language: each is followed by the one 7 further on in this list, mostly."""
KINDS: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "eagle3": (Eagle3Trainee, Eagle3Options, {}),
    "dflash": (DFlashTrainee, DFlashOptions, {"mask_token": 5}),
    "dflash, all see each other": (DFlashTrainee, DFlashOptions, {"mask_token": 5, "causal": False}),
    "dflash, from the anchor": (DFlashTrainee, DFlashOptions, {"mask_token": 5, "from_anchor": True}),
    "dspark": (DSparkTrainee, DSparkOptions, {"mask_token": 5, "markov_rank": 6}),
    "p-eagle": (ParallelEagle3Trainee, ParallelEagle3Options, {"mask_token": 5}),
    "medusa": (MedusaTrainee, MedusaOptions, {"num_blocks": 2}),
    "mtp": (MtpTrainee, MtpOptions, {}),
}
"""By name, what makes a trainee: its class, its options' class, and the options besides `num_drafts`."""


def save_target(path: Path) -> Path:
    """A Llama that speaks a language, which its layers make a little less regular; its tokenizer has whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=False,
        eos_token_id=0,
        bos_token_id=None,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data *= 0.04
        layer.mlp.down_proj.weight.data *= 0.04
    embedding, head = model.model.embed_tokens.weight.data, model.lm_head.weight.data
    embedding /= embedding.norm(dim=1, keepdim=True)
    head.zero_()
    head[DRAFTABLE.roll(-7)] = 4.0 * embedding[DRAFTABLE]
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0").save_pretrained(path)
    return path


def make_trainee(kind: str, target: FrozenTarget, *, draft_vocab: bool, noise: float = 0.0, **options: Any) -> Trainee:
    """A head as it begins, or with noise on all of its weights."""
    trainee_class, options_class, chosen = KINDS[kind]
    ids = DRAFTABLE if draft_vocab else torch.arange(VOCAB)
    made = options_class(**{"num_drafts": DRAFTS, **chosen, **options})
    torch.manual_seed(1)
    trainee: Trainee = trainee_class(target.facts(), target.layer_shape(), DraftVocabulary(ids, VOCAB), made)
    with torch.no_grad():
        for parameter in trainee.parameters():
            parameter += noise * torch.randn(parameter.shape)
    return trainee


def make_batch(target: FrozenTarget, trainee: Trainee, texts: Sequence[Sequence[int]], first: int) -> TrainingBatch:
    """Texts of which all from position `first` on was the target's."""
    length = max(map(len, texts))
    tokens = torch.zeros((len(texts), length), dtype=torch.int64)
    valid = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
        valid[row, : len(text)] = True
    answer = valid & (torch.arange(length) >= first)
    states, final = target.hidden(tokens, valid, trainee.states_of(target.num_layers))
    return TrainingBatch(tokens, answer, valid, states, final)


def answers(path: Path, count: int, length: int, seed: int) -> list[Example]:
    """The target's greedy answers to random prompts of 3 tokens of its language."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(path)
    chosen = torch.randint(len(DRAFTABLE), (count, 3), generator=torch.Generator().manual_seed(seed))
    prompts = DRAFTABLE[chosen]
    model.generation_config.eos_token_id = None
    found = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=length, do_sample=False, pad_token_id=0
    )
    return [Example.answered(text[:3], text[3:]) for text in found.tolist()]


class Loaded:
    """A head as the engine loads it, and what it computes, chain by chain, in a cache of its own."""

    def __init__(self, trainee: Trainee, directory: Path, target: Path) -> None:
        export_head(trainee, directory, torch.float32)
        self.target: DecoderModel = load_model(target, dtype=torch.float32, max_positions=CONTEXT)
        self.checkpoint = open_draft(directory)
        self.head: Any = load_head(self.checkpoint, self.target, max_positions=CONTEXT)

    @torch.inference_mode()
    def states(self, text: Sequence[int]) -> torch.Tensor:
        """What the engine's own target gives the head of a text: [T, n * Ht]."""
        layers = self.checkpoint.config.states_of(self.target.config)
        window = pack([(text, 0, 0)])
        _, states = self.target.forward_with_aux(window, self.target.allocate_cache(2, CONTEXT), layers)
        return torch.cat(states, 1)

    @torch.inference_mode()
    def chain(self, text: Sequence[int], place: int, drafts: int) -> list[torch.Tensor]:
        """Logits of drafts one after another, the last committed hidden state standing at `place`; every draft is
        taken for the token that the text has.
        """
        cache = self.head.allocate_cache(2, CONTEXT)
        states = self.states(text)[: place + 1]
        hidden = self.head.read_target(pack([(text[1 : place + 2], 0, 0)]), states, None, cache)[-1:]
        hidden, logits = self.head.read_out(hidden)
        found = [logits[0]]
        for step in range(1, drafts):
            window = pack([(text[place + 1 + step : place + 2 + step], place + step, 0)])
            hidden, logits = self.head.read_out(self.head.read_own(window, hidden, cache))
            found.append(logits[0])
        return found

    @torch.inference_mode()
    def parallel(self, text: Sequence[int], place: int, drafts: int) -> list[torch.Tensor]:
        """The same of drafts that masked places make in one pass."""
        masks, cache = drafts - 1, self.head.allocate_cache(2, CONTEXT)
        states = torch.cat((self.states(text)[: place + 1], self.head.mask_state.expand(masks, -1)))
        window = pack([([*text[1 : place + 2], *[self.head.mask_token] * masks], 0, 0)])
        hidden = self.head.read_target(window, states, None, cache)[-drafts:]
        return list(self.head.read_out(hidden)[1])

    @torch.inference_mode()
    def heads(self, text: Sequence[int], place: int, drafts: int) -> list[torch.Tensor]:
        """The same of Medusa's heads."""
        hidden = self.states(text)[place : place + 1]
        return [self.head.logits(head, hidden)[0] for head in range(drafts)]

    @torch.inference_mode()
    def block(self, text: Sequence[int], anchor: int, drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the drafts after an anchor, what the layers give after the final norm and the logits of that."""
        cache = self.head.allocate_cache(2, CONTEXT)
        states = self.states(text)[:anchor]
        self.head.precompute_and_store_context_kv(pack([(text[:anchor], 0, 0)]), states, None, cache)
        queries = self.head.config.queries(drafts)
        window = pack([([text[anchor], *[self.head.mask_token] * (queries - 1)], anchor, 0)])
        window = window._replace(ancestors=torch.full((queries,), (1 << queries) - 1, dtype=torch.int64))
        hidden = self.head.read_block(window, torch.arange(queries) > 0, cache)
        found: tuple[torch.Tensor, torch.Tensor] = self.head.read_out(hidden, 1, queries, drafts)
        return found
