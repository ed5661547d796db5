"""Tiny random models of several families; no downloads."""

import contextlib
import gc
import json
from unittest.mock import patch

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch

collect_ignore = [f"training/{name}.py" for name in ("interrupted", "processes", "runs", "trl_script")]
"""Scripts that tests start in processes of their own."""


def pytest_collection():
    gc.disable()  # what test modules import is no garbage


def pytest_collection_finish():
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _older_objects_are_not_searched():
    """Accelerate collects garbage whenever training starts: half of a toy run, were all that was imported searched."""
    gc.collect()
    gc.freeze()


VOCAB, EOS = 23, [2, 7, 12]  # several, so that short completions do end


def tiny_config(**changes):
    """A Llama with 2 layers, width 16 and 23 tokens."""
    values = dict(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=EOS,
        pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    return LlamaConfig(**{**values, **changes})


def tiny_gpt2(**changes):
    """A GPT-2 of the same size: absolute positions, layer norms that are exact in float64."""
    values = dict(
        vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=EOS,
        initializer_range=0.3, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2Config(**{**values, **changes})


def generator(seed=0):
    """One with a seed of its own."""
    return torch.Generator().manual_seed(seed)


def word_tokenizer(words, unknown, **special) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words, whose ids are their places; ``special`` are its special tokens."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def perturb_adapter(backbone: Backbone, seed: int = 0, scale: float = 0.3) -> Backbone:
    """Make LoRA's B non-zero, so that the policy differs from the reference."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in backbone.trainable_parameters():
            p.add_(scale * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return backbone


def make_backbone(config=None, dtype=torch.float64, perturb=True, seed=0, **lora) -> Backbone:
    """A tiny backbone with a LoRA adapter."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config or tiny_config(), dtype=dtype)
    backbone = Backbone(model, None, LoraSettings(r=2, alpha=4, **lora))
    return perturb_adapter(backbone) if perturb else backbone


@contextlib.contextmanager
def float64_throughout():
    """Within this context float32 is another name of float64.

    Most models compute norms, rotations, routers or states in float32 whatever their type. That is rounding, not a
    mistake, but it would hide mistakes below 1e-7.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with (
            patch.object(torch, "float32", torch.float64),
            patch.object(torch, "float", torch.float64),
            patch.object(torch.Tensor, "float", torch.Tensor.double),
        ):
            yield
    finally:
        torch.set_default_dtype(before)


def save_toy_base(folder):
    """The toy task, with its base and tokenizer in a folder; the task's own policy has no adapter afterwards."""
    from grade.training.toy import toy_task

    task = toy_task(lora=None)
    task.backbone.peft.unload().save_pretrained(folder)
    task.backbone.tokenizer.save_pretrained(folder)
    return task


def gradient(backbone: Backbone) -> torch.Tensor:
    """What the last backward pass left at the adapter, flattened."""
    return flatten(p.grad for p in backbone.trainable_parameters())


def flat_grad(value: torch.Tensor, backbone: Backbone) -> torch.Tensor:
    """The gradient of a value by the adapter; 0 where it does not depend on it."""
    grads = torch.autograd.grad(value, backbone.trainable_parameters(), retain_graph=True, materialize_grads=True)
    return flatten(grads)


def make_prompts(batch=3, length=5, seed=0) -> PromptBatch:
    """Left-padded random prompts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch):
        mask[row, : row % length] = 0
    return PromptBatch(ids * mask, mask)


class ToyReward(nn.Module):
    """A smooth function of every embedding that depends on order: sigmoid of a weighted sum of tanh."""

    def __init__(self, dim: int, dtype=torch.float64, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("w", torch.randn(dim, generator=generator, dtype=torch.float64).to(dtype))

    def forward(self, embeds, mask):
        mask = mask.to(embeds.dtype)
        position = torch.linspace(0.5, 1.5, embeds.shape[1], dtype=embeds.dtype)
        value = torch.tanh(3 * embeds @ self.w) * position * mask
        return torch.sigmoid(value.sum(1) / mask.sum(1))


def save_toy_files(root):
    """The toy task's base, its reward `bag`, its gold judge and 40 reviews of every split, in a folder."""
    from grade.data.reviews import prompt_text
    from grade.training.toy import toy_reviews

    task = save_toy_base(root / "base")
    task.reward_model.save(root / "bag")
    task.judge.save(root / "judge.npz")
    (root / "reviews").mkdir()
    for seed, split in enumerate(("policy", "validation", "reward", "test", "gold")):
        rows = [review._asdict() | {"prompt": prompt_text(review.text)} for review in toy_reviews(40, seed)]
        (root / "reviews" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """What `save_toy_files` writes; tests leave it as it is."""
    root = tmp_path_factory.mktemp("toy")
    save_toy_files(root)
    return root


@pytest.fixture(scope="session")
def base(toy):
    """A folder with a tiny model and its tokenizer."""
    return toy / "base"


@pytest.fixture
def backbone():
    return make_backbone()


@pytest.fixture
def prompts():
    return make_prompts()


@pytest.fixture
def reward(backbone):
    return ToyReward(backbone.hidden_size)


def saved_bytes(fn, exclude=()):
    """Bytes of the unique storages that autograd packs while ``fn`` runs, those of ``exclude`` left out, unrounded.

    A storage counts once and whole, however many views of it are saved. What a checkpointed region would save is not
    packed here; if ``fn`` itself runs backward, what is packed in a recomputation does count.
    """
    excluded = {tensor.untyped_storage()._cdata for tensor in exclude}
    # Hold the storages until the end: a freed address could be used again for another storage.
    packed = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in excluded:
            packed[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fn()
    return sum(storage.nbytes() for storage in packed.values())
