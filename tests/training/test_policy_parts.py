"""The policy, what it is trained on and its evaluation, one function at a time."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_config
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from grade.errors import InputError
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.sampling import generate
from grade.models.scoring import sequence_kl
from grade.training import evaluate as evaluations
from grade.training import load, merge, policy, toy
from grade.training.config import TrainConfig
from grade.training.elsewhere import Elsewhere, make_elsewhere
from grade.training.evaluate import Sampling, evaluate_examples
from grade.training.task import rows


# ---- the policy ----
def arguments(**values):
    common = dict(
        temperature=1.0, bf16=False, sharded=False, device=torch.device("cpu"), seed=3, model_init_kwargs=None
    )
    return SimpleNamespace(**common | values)


def base():
    return AutoModelForCausalLM.from_config(tiny_config())


TOKENIZER = range(20)


def factors(backbone):
    return torch.cat([p.detach().flatten() for p in backbone.trainable_parameters()])


def test_a_policy_of_a_model_has_an_adapter_of_the_runs_seed():
    one, two, other = (policy.make_policy(base(), arguments(seed=seed), TOKENIZER) for seed in (3, 3, 4))
    assert torch.equal(factors(one), factors(two)) and not torch.equal(factors(one), factors(other))
    config = one.peft.peft_config["default"]
    assert (config.r, config.lora_alpha, sorted(config.target_modules)) == (
        16, 32, ["k_proj", "o_proj", "q_proj", "v_proj"]
    )  # fmt: skip
    assert one.tokenizer is TOKENIZER and one.head.temperature == 1.0


def test_settings_of_an_adapter_are_for_models_without_one():
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    made = policy.make_policy(base(), arguments(temperature=0.5), TOKENIZER, lora)
    assert made.peft.peft_config["default"].r == 2 and made.head.temperature == 0.5
    wrapped = get_peft_model(base(), LoraConfig(r=3, target_modules=["q_proj"]))
    assert policy.make_policy(wrapped, arguments(), TOKENIZER).peft is wrapped
    for model, allowed in ((wrapped, "the model is a PeftModel"), (make_backbone(), "the backbone has an adapter")):
        with pytest.raises(InputError, match=f"peft_config: got 'given'; allowed: none: {allowed}"):
            policy.make_policy(model, arguments(), TOKENIZER, lora)
    with pytest.raises(InputError, match="peft_config: got 'dict'; allowed: a LoraConfig"):
        policy.make_policy(base(), arguments(), TOKENIZER, {})
    with pytest.raises(InputError, match="model: got 'a backbone without an adapter'"):
        policy.make_policy(Backbone(base()), arguments())
    with pytest.raises(InputError, match="model: got 'int'; allowed: a name"):
        policy.make_policy(3, arguments())


def test_a_backbone_stays_as_it_is_but_for_tokenizer_and_temperature():
    backbone = make_backbone()
    backbone.tokenizer = "mine"
    name = backbone.peft.peft_config["default"].base_model_name_or_path
    assert policy.make_policy(backbone, arguments()) is backbone and backbone.tokenizer == "mine"
    assert policy.make_policy(backbone, arguments(temperature=2.0), TOKENIZER).head.temperature == 2.0
    assert backbone.tokenizer is TOKENIZER and backbone.peft.peft_config["default"].base_model_name_or_path == name


@pytest.mark.parametrize(("bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float64)])
def test_only_the_base_is_cast(bf16, dtype):
    backbone = make_backbone()
    policy.place(backbone, arguments(bf16=bf16))
    for name, p in backbone.model.named_parameters():
        assert p.dtype == (torch.float64 if "lora_" in name else dtype), name


def test_a_base_is_divided_once_where_it_is_to_be(monkeypatch):
    divided, backbone = [], make_backbone()
    monkeypatch.setattr(policy, "shard", lambda *args: divided.append(args))
    policy.place(backbone, arguments(sharded=True))
    assert divided == [(backbone, torch.device("cpu"))]
    backbone.shards = object()
    policy.place(backbone, arguments(sharded=True, bf16=True))
    assert len(divided) == 1 and backbone.dtype == torch.float64


@pytest.mark.parametrize(
    ("given", "dtype", "attention"),
    [
        (None, "float32", "auto"), ({}, "float32", "auto"), ({"dtype": "bfloat16"}, "bfloat16", "auto"),
        ({"torch_dtype": torch.float64}, "float64", "auto"),
        ({"dtype": "float16", "torch_dtype": "x"}, "float16", "auto"),
        ({"attn_implementation": "eager"}, "float32", "eager"), ({"attn_implementation": None}, "float32", "auto"),
    ],
)  # fmt: skip
def test_a_policy_by_name_is_loaded_as_it_is_told(given, dtype, attention, monkeypatch):
    asked, made = [], SimpleNamespace(model=base(), tokenizer="own", added=[])
    made.add_adapter = lambda lora, seed: made.added.append((lora, seed))
    monkeypatch.setattr(policy.Backbone, "load", lambda *args, **kwargs: asked.append((args, kwargs)) or made)
    assert policy._load("name", arguments(model_init_kwargs=given), None, None) is made
    assert asked == [(("name", dtype), {"attention": attention})] and made.tokenizer == "own"
    assert made.added == [(LoraSettings(), 3)]
    policy._load("name", arguments(model_init_kwargs=given), "mine", "lora")
    assert made.tokenizer == "mine" and made.added[1] == ("lora", 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"b": 1, "a": 2}, "model_init_kwargs: got 'a'; allowed: dtype, torch_dtype, attn_implementation"),
     ({"dtype": "int8"}, "model_init_kwargs: dtype: got 'int8'; allowed: float32, bfloat16")],
)  # fmt: skip
def test_what_a_name_is_not_loaded_with(given, message):
    with pytest.raises(InputError, match=message):
        policy._load("name", arguments(model_init_kwargs=given), None, None)


def test_an_adapter_is_on_the_usual_layers_or_on_all():
    assert policy._default_lora(base()) == LoraSettings()
    other = policy._default_lora(torch.nn.ModuleDict({"q_proj": torch.nn.Linear(1, 1), "mlp": torch.nn.Linear(1, 1)}))
    assert isinstance(other, LoraConfig)
    assert (other.r, other.lora_alpha, other.target_modules) == (16, 32, "all-linear")


def test_a_base_is_named_so_that_it_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    backbone = make_backbone()
    config = backbone.peft.peft_config["default"]
    for path, before, name, want in (
        ("here", None, None, str(tmp_path / "here")), ("some/model", None, None, "some/model"),
        ("", "before", None, "before"), ("here", None, "there", "there"), ("", None, "here", "here"),
        ("", "", None, ""),
    ):  # fmt: skip
        backbone.model.config._name_or_path, config.base_model_name_or_path = path, before
        policy.name_base(backbone, name)
        assert config.base_model_name_or_path == want
    config.target_modules = {"b", "a"}
    policy.name_base(backbone)
    assert config.target_modules == ["a", "b"]


@pytest.mark.parametrize(
    ("method", "sampler", "kind"),
    [("ste", "own", "NoneType"), ("rloo", "own", "PolicyGradient"), ("rloo", "shared", "PolicyGradient"),
     ("distilled", "own", "DistilledGradient"), ("distilled", "shared", "DistilledFromGiven")],
)  # fmt: skip
def test_what_takes_a_methods_step(method, sampler, kind, tmp_path):
    config = TrainConfig(output_dir=str(tmp_path), method=method, sampler=sampler, use_cpu=True)
    assert type(policy.make_learner(config, make_backbone())).__name__ == kind


# ---- a task ----
def test_a_task_is_loaded_as_its_settings_name_it(monkeypatch, tmp_path):
    asked = []
    backbone = make_backbone()
    monkeypatch.setattr(load.Backbone, "load", lambda *args: asked.append(args) or backbone)
    monkeypatch.setattr(load, "make_rewards", lambda *args: args)
    monkeypatch.setattr(load, "load_prompts", lambda name: [name])
    monkeypatch.setattr(load.GoldJudge, "load", lambda name: f"judge {name}")
    common = dict(output_dir=str(tmp_path), method="rloo", use_cpu=True, model="m", seed=7, train_dataset="t")
    config = TrainConfig(**common, reward=["a", "b"], gold="g", eval_dataset="e", reward_scope="completion")
    task = load.load_task(config, "cpu")
    assert asked[-1] == ("m", "float32", config.lora, None, "cpu", "auto", 7) and task.backbone is backbone
    assert task.reward_model == (["a", "b"], backbone, None, None, "completion") and task.judge == "judge g"
    assert (task.train_prompts, task.validation_prompts) == (["t"], ["e"])
    config = TrainConfig(**common, reward="a", eval_dataset="")
    task = load.load_task(config, "meta", "folder")
    assert asked[-1] == ("m", "float32", None, "folder", "meta", "auto", 7)
    assert task.judge is None and task.validation_prompts == [] and task.reward_model[0] == "a"
    placed = []
    monkeypatch.setattr(TrainConfig, "sharded", True)
    monkeypatch.setattr(load, "place", lambda *args: placed.append(args))
    load.load_task(config, "meta")
    assert asked[-1][4] == "cpu" and placed == [(backbone, config)]  # no device need hold all of it
    with pytest.raises(InputError, match="gumbel_topk"):
        load.load_task(TrainConfig(**common | {"method": "ste"}, gumbel_topk=24))


def test_prompts_are_rows():
    assert rows(["a", "b"]) == [{"prompt": "a"}, {"prompt": "b"}] and rows([]) == []
    given = [{"prompt": "a", "n": 1}]
    assert rows(given) is given


def test_toy_reviews_are_three_sentences_half_of_them_positive():
    reviews = toy.toy_reviews(6)
    assert [review.label for review in reviews] == [0, 1, 0, 1, 0, 1]
    for review in reviews:
        words, others = (toy._GOOD, toy._BAD) if review.label else (toy._BAD, toy._GOOD)
        assert review.text.count(".") == 3 and any(word in review.text for word in words)
        assert not any(word in review.text for word in others) and review.text.count(" was ") >= 3
    assert toy.toy_reviews(6) == toy.toy_reviews(6, 0) == reviews != toy.toy_reviews(6, 1)


# ---- merging ----
def test_the_adapter_of_a_run_is_found(tmp_path):
    def adapter(folder):
        folder.mkdir(parents=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).write_text("")
        return folder

    run = adapter(tmp_path / "run" / "adapter")
    assert merge.adapter_folder(tmp_path / "run") == run == merge.adapter_folder(run)
    own = adapter(tmp_path / "both")
    adapter(tmp_path / "both" / "adapter")
    assert merge.adapter_folder(own) == own
    (run / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match="of an adapter or of a checkpoint$"):
        merge.adapter_folder(tmp_path / "run")
    (tmp_path / "run" / "checkpoint-3").mkdir()
    with pytest.raises(InputError, match="the newest checkpoint of this unfinished run is .*checkpoint-3"):
        merge.adapter_folder(tmp_path / "run")


# ---- another sampler ----
def test_our_own_sampler_needs_none(tmp_path, monkeypatch):
    config = TrainConfig(output_dir=str(tmp_path), method="rloo", use_cpu=True)
    assert make_elsewhere(config, make_backbone(), None, None) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_the_adapter_is_handed_over_once_a_step_by_the_first_process(rank):
    from grade.models.samplers import OwnSampler

    calls = []

    class Noted(OwnSampler):
        def publish(self, backbone):
            calls.append("publish")
            return "name"

        def use(self, published):
            calls.append(("use", published))

        def close(self):
            calls.append("close")

        def sample(self, backbone, prompts, most, generator, least):
            calls.append(("sample", len(prompts), most, least))
            return super().sample(backbone, prompts, most, generator, least)

    class Alone:
        def __call__(self, work):
            return work()

        def gather(self, names):
            return ["name" if rank else names[0]]

    args = SimpleNamespace(sampler="shared", process_index=rank, group=2, max_completion_length=4,
                           min_completion_length=1, sampler_max_difference=1e-6, importance_sampling="none",
                           importance_sampling_cap=2.0)  # fmt: skip
    notes, backbone = [], make_backbone()
    window = SimpleNamespace(note=notes.append)
    with Elsewhere(args, backbone, Alone(), None, Noted()) as made:
        for step in (1, 1, 2):
            made.draw(make_prompts(), torch.Generator().manual_seed(0), step, window)
        assert len(made._given) == 3 and made._given[0].ids.shape[0] == 6
        assert made._given[0].prompts.ids.shape[0] == 6
        engine = made.given(lambda completions: completions)
        assert torch.equal(engine()[0], made._given[0].ids) and len(made._given) == 2
    first = (["publish"] if rank == 0 else []) + [("use", "name")]
    sampled = ("sample", 6, 4, 1)
    assert calls == [*first, sampled, sampled, *first, sampled, "close"]
    assert set(notes[0]) == {"sampler/mean_ratio", "sampler/largest_difference", "sampler/seconds"}
    assert all(value.dtype == torch.float64 for value in notes[0].values())
    assert notes[0]["sampler/mean_ratio"].item() == pytest.approx(1, abs=1e-9) and notes[0]["sampler/seconds"] > 0
    with made:
        assert made._given == [] and made._published == -1


# ---- evaluations ----
class Words:
    """Decodes ids as numbers."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(map(str, ids)) + " "


@pytest.fixture(scope="module")
def evaluated():
    backbone = make_backbone()
    backbone.tokenizer = Words()
    return backbone


class Lengths:
    """A reward that counts tokens, with its parts."""

    reward_model = SimpleNamespace(last=None)

    def __init__(self, change=lambda x: x, parts=False):
        self.change, self.calls = change, []
        self.reward_model = SimpleNamespace(last=None)
        self.parts = parts

    def score(self, backbone, prompts, ids, mask):
        self.calls.append(len(ids))
        if self.parts:
            self.reward_model.last = SimpleNamespace(values={"n": mask.sum(1).float()})
        return self.change(mask.sum(1).double())


def encode(examples):
    return make_prompts(7)[torch.tensor([example["n"] for example in examples])]


EXAMPLES = [{"n": n} for n in range(7)]


def found(backbone, objective=None, judge=None, **settings):
    sampling = Sampling(**{"max_new_tokens": 3, "batch_size": 3, "kl_prompts": 4} | settings)
    return evaluate_examples(backbone, EXAMPLES, encode, objective or Lengths(), sampling, judge)


def test_an_evaluation_is_of_the_noise_of_its_seed_in_any_batches(evaluated):
    plain = found(evaluated)
    assert len(plain.prompts) == len(plain.completions) == len(plain.reward) == 7 and len(plain.kl) == 4
    for size in (1, 2, 7, 9):
        other = found(evaluated, batch_size=size)
        assert other.completions == plain.completions and other.reward.tolist() == plain.reward.tolist()
        np.testing.assert_allclose(other.kl, plain.kl, rtol=1e-9)
    assert found(evaluated, seed=1).completions == plain.completions != found(evaluated, seed=2).completions
    assert found(evaluated, noise_block=2).completions != plain.completions
    assert found(evaluated, noise_block=64).completions == plain.completions
    assert np.isnan(plain.gold).all() and plain.parts == {} and plain.reward.dtype == np.float64
    assert plain.prompts[1] == " ".join(map(str, make_prompts(7).ids[1, 1:].tolist())) + " "


@pytest.mark.parametrize("n", [0, 1, 3, 4, 7, 9])
def test_kl_is_the_mean_over_each_completions_tokens(evaluated, n):
    got = found(evaluated, kl_prompts=n, batch_size=7, min_new_tokens=2)
    noise = torch.Generator().manual_seed(1)
    prompts = encode(EXAMPLES)
    ids, mask = generate(evaluated, prompts, 3, noise, min_new_tokens=2)
    each = sequence_kl(evaluated, prompts, ids, mask)[:n]
    np.testing.assert_allclose(got.kl, (each.sum(1) / mask[:n].sum(1)).numpy(), rtol=1e-9)
    assert got.kl_max == pytest.approx(float(each.abs().max()) if n else 0.0)
    assert got.reward.tolist() == mask.sum(1).tolist()


def test_the_judge_reads_prompt_and_completion_and_parts_are_kept(evaluated):
    seen = []
    judge = SimpleNamespace(score=lambda texts: seen.extend(texts) or np.arange(len(texts)) / 8)
    got = found(evaluated, Lengths(parts=True), judge, batch_size=7)
    assert seen == [p + c for p, c in zip(got.prompts, got.completions, strict=True)]
    assert got.gold.tolist() == [n / 8 for n in range(7)]
    assert got.parts["n"].tolist() == got.reward.tolist() and got.parts["n"].dtype == np.float64
    bad = SimpleNamespace(score=lambda texts: np.array([np.inf] * len(texts)))
    with pytest.raises(InputError, match="gold: got inf"):
        found(evaluated, judge=bad)
    with pytest.raises(InputError, match="reward: got nan"):
        found(evaluated, Lengths(lambda x: x * torch.nan))


@pytest.mark.parametrize(("sharded", "passes"), [(False, [2, 1]), (True, [2, 2])])
def test_processes_share_the_batches_and_a_divided_base_needs_all_of_them(evaluated, sharded, passes):
    """Three batches of 3, 3 and 1 prompts for two processes."""
    before = dict(vars(evaluated))
    whole = found(evaluated)
    try:
        if sharded:
            evaluated.shards = SimpleNamespace(any=lambda flag: True)
        shares, calls = [], []
        for rank in (0, 1):
            objective = Lengths()
            noise = Sampling(max_new_tokens=3, batch_size=3, kl_prompts=4)
            shares.append(evaluations._own_batches(evaluated, EXAMPLES, encode, objective, noise, None, rank, 2))
            calls.append(objective.calls)
    finally:
        vars(evaluated).clear()
        vars(evaluated).update(before)
    assert [[number for number, _ in share] for share in shares] == [[0, 2], [1]]
    assert [len(call) for call in calls] == passes and calls[0] == [3, 1] and calls[1] == [3, 1][: passes[1]]
    tried = []
    got = evaluate_examples(
        evaluated, EXAMPLES, encode, Lengths(), noise, None, (1, 2), lambda own: [*own, *shares[0]],
        lambda work: tried.append(0) or work(),
    )  # fmt: skip
    assert got.completions == whole.completions and got.reward.tolist() == whole.reward.tolist() and tried == [0]
    np.testing.assert_allclose(got.kl, whole.kl, rtol=1e-9)
