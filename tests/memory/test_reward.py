"""A classifier as the reward of a traced step: against real steps, with `grade.rewards`' own classes, and bad ones."""

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoConfig, BertConfig, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, T5Config, ViTConfig

from grade.errors import InputError
from grade.experiments.bench import measure
from grade.memory.models import TINY
from grade.memory.settings import StepConfig
from grade.memory.step import build, make_step
from grade.memory.trace import run_tracked, trace
from grade.rewards.base import Reward
from grade.rewards.classifier import EmbeddedClassifier, TextClassifier

VOCAB, CONTEXT = TINY["vocab_size"], 64
SIZES = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, bos_token_id=1,
             eos_token_id=2, pad_token_id=0, num_labels=1)  # fmt: skip
STEP = dict(model="tiny", prompt_tokens=4, max_new_tokens=12, dtype="float32")
RELAXED = STEP | dict(batch_size=3, gumbel_topk=8)


@pytest.fixture(scope="module")
def rewards(tmp_path_factory):
    """Folders with nothing but config.json, by name."""
    short = dict(max_position_embeddings=CONTEXT)
    configs = {
        "bert": BertConfig(vocab_size=VOCAB, **SIZES, **short),
        "bert_300": BertConfig(vocab_size=300, **SIZES, **short),
        "llama": LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, **SIZES, **short),
        "llama_300": LlamaConfig(vocab_size=300, **SIZES | dict(pad_token_id=None), **short),
        "gpt2": GPT2Config(
            vocab_size=VOCAB, n_embd=48, n_layer=2, n_head=2, n_positions=CONTEXT, bos_token_id=1, eos_token_id=2,
            num_labels=3,
        ),
        "wide": LlamaConfig(vocab_size=VOCAB, **SIZES | dict(hidden_size=256, num_hidden_layers=3), dtype="bfloat16"),
        "t5": T5Config(),
        "vit": ViTConfig(),
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("rewards")
    for name, config in configs.items():
        config.save_pretrained(folder / name)
    return lambda name: f"hf:{folder / name}"


def characters(vocab: int) -> PreTrainedTokenizerFast:
    """A tokenizer of single characters: the text of n tokens has n tokens, and no special ones are added."""
    names = {chr(0x4E00 + i): i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token=chr(0x4E00)))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


class Real(nn.Module, Reward):
    """A reward of `grade.rewards` whose weights count."""

    def __init__(self, reward):
        super().__init__()
        self.model, self.reward = reward.model, reward

    scope = "prompt_and_completion"
    reads = property(lambda self: self.reward.reads)

    def score(self, *args):
        return self.reward.score(*args)

    def differentiable(self, *args):
        return self.reward.differentiable(*args)


CASES = [
    (RELAXED | dict(method="ste"), "bert"),
    (RELAXED | dict(method="gumbel"), "llama"),
    (RELAXED | dict(method="gumbel_rao", gradient_checkpointing=True), "gpt2"),
    (RELAXED | dict(method="ste_legacy"), "bert"),
    (STEP | dict(method="grpo"), "bert"),
    (STEP | dict(method="rloo"), "bert_300"),
    (STEP | dict(method="remax", batch_size=3), "llama_300"),
    (STEP | dict(method="ppo", batch_size=4, passes_per_step=1), "gpt2"),
    (STEP | dict(method="grpo"), "wide"),
    (RELAXED | dict(method="ste"), "wide"),
]


@pytest.mark.parametrize(("values", "name"), CASES, ids=str)
def test_a_traced_step_with_a_classifier_has_the_peak_of_one_with_the_real_class(values, name, rewards):
    config = StepConfig(**values, reward=rewards(name))
    backbone, (stand_in,) = build(config, device="cpu")
    backbone.tokenizer, model = characters(VOCAB), stand_in.model
    label = model.config.id2label[0] if model.config.num_labels > 1 else None
    stand_in.model.config.pad_token_id = AutoConfig.from_pretrained(config.reward.removeprefix("hf:")).pad_token_id
    if name.endswith("_300"):
        real = TextClassifier(model, characters(300), label)
    else:
        real = EmbeddedClassifier(model, characters(VOCAB), backbone, label)
    peak = run_tracked(make_step(config, backbone, [Real(real)])).peak
    assert trace(config, device="cpu").peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize("method", ["ste", "grpo"])
def test_the_reward_s_forward_and_backward_are_part_of_the_step(method, rewards):
    values = (RELAXED if method == "ste" else STEP) | dict(method=method)
    config = StepConfig(**values, reward=rewards("wide"), autocast=method == "ste")
    found = trace(config, device="cpu")
    assert found.peak == pytest.approx(measure(config)["measured_peak_bytes"], rel=0.01)
    _, (reward,) = build(config)
    weights = sum(p.numel() * 2 for p in reward.parameters())  # bfloat16, as its configuration says
    bag = trace(StepConfig(**values), device="cpu")
    assert found.categories["weights"] - bag.categories["weights"] == pytest.approx(weights, rel=0.01)
    assert "reward" in found.phases
    forward = 2 * sum(p.numel() for p in reward.model.model.layers.parameters()) * config.batch_size * 16
    passes = 2 if method == "ste" else 1  # backward reaches the embeddings, not the weights
    assert found.flops - bag.flops == pytest.approx(passes * forward, rel=0.1)  # and attention


@pytest.mark.parametrize("method", ["gumbel", "rloo"])
def test_the_reward_s_layers_are_traced_whole_and_the_policy_s_extrapolated(method, rewards, tmp_path):
    LlamaConfig(**TINY | {"num_hidden_layers": 6}).save_pretrained(tmp_path)
    values = (RELAXED if method == "gumbel" else STEP) | dict(method=method, model=str(tmp_path))
    config = StepConfig(**values, reward=rewards("wide"))
    full, short = (trace(config, device="cpu", all_layers=every) for every in (True, False))
    assert (full.traced_layers, short.traced_layers) == (6, 3)
    assert short.peak == pytest.approx(full.peak, rel=0.005) and short.flops == full.flops


@pytest.mark.parametrize(
    ("method", "name", "changes", "message"),
    [
        ("ste", "bert_300", {}, "reward: got .*; allowed: .* vocabulary of 512 tokens, not 300: ste .*grpo, ppo take"),
        ("reinforce", "bert", dict(max_new_tokens=61), r"got 65; allowed: at most 64 .*the reward"),
        ("reinforce", "nowhere", {}, "reward: got '.*nowhere'; allowed: hf:<Hugging Face id, or folder"),
        ("reinforce", "t5", {}, "reward: got .*; allowed: a sequence classifier that is not an encoder-decoder"),
        ("reinforce", "vit", {}, "reward: got .*; allowed: a sequence classifier"),
    ],
)
def test_rewards_that_cannot_be_traced_are_one_line(method, name, changes, message, rewards):
    with pytest.raises(InputError, match=message):
        trace(StepConfig(**STEP | changes, method=method, reward=rewards(name)))
