"""What the probe computes from which parts, figure by figure, and what a probe from a config is given."""

import math
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch.testing import assert_close

from grade.entropy import probe as probe_module
from grade.entropy import run
from grade.entropy.forward import directional
from grade.entropy.functional import scores_at
from grade.entropy.gradients import entropy_coefficients, prompt_gradients
from grade.entropy.probe import EntropyProbe
from grade.entropy.run import ProbeRunConfig, make_optimizer, probe_adapter, probe_task, reward_gradient
from grade.entropy.samples import draw
from grade.entropy.settings import ProbeConfig
from grade.entropy.snis import linearity_error, prefix_change, reweighted_change
from grade.entropy.tiny import random_prompts, tiny_policy
from grade.entropy.update import UpdateVector, adamw_update, preconditioner
from grade.entropy.ustat import blocks, two_batch, u_statistic
from grade.errors import InputError
from grade.models.parameters import moved, split_vector, trained_parameters
from grade.stats import Estimate
from grade.training.config import TrainConfig

B, G, T, RATE = 3, 4, 2, 0.02


@cache
def policy():
    return tiny_policy()


@cache
def optimizer():
    """AdamW after one step, with a learning rate that is not 1."""
    made = torch.optim.AdamW(trained_parameters(policy()), lr=RATE, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    for p in trained_parameters(policy()):
        p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    made.step()
    made.zero_grad(set_to_none=True)
    return made


def a_probe(**changes):
    values = {"batch_config": {"B": B, "G": G}, "generation": {"max_new_tokens": T},
              "importance_sampling": {"resample_on_low_ess": False}}  # fmt: skip
    return EntropyProbe(policy(), optimizer(), ProbeConfig.parse(values | changes))


def reward(prompts, ids, mask):
    return ((ids == 1) * mask).sum(1) / mask.sum(1) + prompts.ids[:, 0]


def prompts(number=2 * B):
    return random_prompts(policy(), number)


def drawn(some, generator):
    return draw(policy(), some, G, T, generator)


@cache
def pieces(scale=G * T):
    """Evaluation batch, X_n, Y_n and the loss's gradient, from the library's parts."""
    generator = torch.Generator().manual_seed(0)
    evaluation = drawn(prompts()[:B], generator)
    updated = drawn(prompts()[B:], generator)
    flat = [part for _, *part in updated.microbatches(99, "cpu")][0]
    rewards = reward(*flat).double().view(B, G)
    (y,) = prompt_gradients(policy(), updated, [(rewards - rewards.mean(1, keepdim=True)) / scale])
    loss = split_vector(policy(), -y.mean(0))
    old = scores_at(policy(), evaluation)
    (x,) = prompt_gradients(policy(), evaluation, [entropy_coefficients(old.logps.sum(-1))])
    return SimpleNamespace(evaluation=evaluation, x=x, y=y, loss=loss, old=old, rewards=rewards)


def step_of(loss, norm=1.0):
    return adamw_update(optimizer(), trained_parameters(policy()), loss, norm)


def same(found, wanted):
    assert {name: found[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)


def test_every_figure_of_two_batches():
    report, p = a_probe().run(prompts(), reward), pieces()
    vector, ascent = step_of(p.loss), preconditioner(optimizer(), trained_parameters(policy()))
    terms = directional(policy(), p.evaluation, vector.total)
    new, old = scores_at(policy(), p.evaluation, vector.total), p.old
    sums = [z.sum(-1) for z in (old.logps, new.logps, old.entropies, new.entropies)]
    change, tokens = reweighted_change(*sums), reweighted_change(*sums, p.evaluation.mask.sum(-1))
    by_prefix = prefix_change(old.logps, new.logps, old.entropies, new.entropies)
    linear, product = linearity_error(terms.per_sequence(), by_prefix), two_batch(p.x, p.y * ascent)
    parts = {name: float(-p.x.mean(0) @ getattr(vector, name)) for name in ("momentum", "gradient", "decay")}
    predicted, forward = Estimate.of(-(p.x @ vector.total)), Estimate.of(terms.per_sequence().mean(1))
    per_token = Estimate.of(terms.per_token(p.evaluation.mask).mean(1))
    wanted = {
        "delta_h1": predicted.mean, "delta_h1_stderr": predicted.stderr, "clipped": vector.clipped,
        **{f"delta_h1_{name}": value for name, value in parts.items()}, "update_norm": float(vector.total.norm()),
        "delta_h1_ascent": -RATE * product.value, "delta_h1_ascent_stderr": RATE * product.stderr,
        "delta_h1_forward": forward.mean, "delta_h1_forward_stderr": forward.stderr,
        "delta_h1_forward_per_token": per_token.mean, "delta_h1_forward_per_token_stderr": per_token.stderr,
        "entropy": change.before, "entropy_after": change.after, "delta_h": change.change,
        "delta_h_stderr": change.stderr, "entropy_per_token": tokens.before, "delta_h_per_token": tokens.change,
        "delta_h_per_token_stderr": tokens.stderr, "ess": change.ess, "clipped_weights": 0.0, "resampled": 0.0,
        "delta_h_prefix": float(by_prefix.mean()), "delta_h_prefix_stderr": Estimate.of(by_prefix.mean(1)).stderr,
        "linearity_error": linear[0], "linearity_error_stderr": linear[1],
        "samples": B * G, "prompts": B, "reward_mean": float(p.rewards.mean()),
    }  # fmt: skip
    same(report.figures, wanted)
    phases = ("sampling", "update", "gradients", "forward mode", "importance sampling")
    assert set(report.figures) == {*wanted, *(f"seconds/{name}" for name in phases)}
    assert_close(report.step, vector.total), assert_close(report.sequences, terms.per_sequence())
    assert torch.equal(report.samples.ids, p.evaluation.ids) and report.sweep == []
    named = [(n, q.numel()) for n, q in policy().model.named_parameters() if q.requires_grad]
    terms_of = (-p.x.mean(0) * vector.total).split([size for _, size in named])
    modules = {}
    for (name, _), term in zip(named, terms_of, strict=True):
        modules.setdefault(name.split(".lora_")[0], []).append(float(term.sum()))
    same(report.modules, {name: sum(values) for name, values in modules.items()})
    assert set(report.modules) == set(modules) and all(len(values) == 2 for values in modules.values())


@pytest.mark.parametrize("update", ["dr_grpo", "rloo"])
def test_an_updates_gradient_weighs_advantages(update):
    generator = torch.Generator().manual_seed(0)
    probe, p = a_probe(probe_config={"update": update}), pieces(scale={"dr_grpo": G * T, "rloo": G - 1}[update])
    y, loss, rewards = probe._update(prompts(), drawn(prompts()[:B], generator), reward, None, generator)
    assert_close(y, p.y), assert_close(rewards, p.rewards)
    for got, want in zip(loss, p.loss, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize(("mode", "size"), [("exact", 2), ("blocks", 2), ("blocks", 1)])
@pytest.mark.parametrize(("plug_in", "jackknife"), [(True, True), (True, False), (False, True)])
def test_one_batch_is_paired(mode, size, plug_in, jackknife):
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    probe = a_probe(
        batch_config={"B": 6}, probe_config={"one_batch": True, "mode": mode, "block_size": size},
        stats_config={"compute_plugin_se": plug_in, "compute_jackknife_se": jackknife},
    )  # fmt: skip
    scale = torch.tensor([1.0, 2.0, 3.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module, "preconditioner", lambda *_: scale)
        found = probe._ascent(x, y)
        patch.setattr(probe_module, "preconditioner", lambda *_: None)
        assert probe._ascent(x, y) == {}
    units = (x, y * scale.double()) if mode == "exact" else (blocks(x, size), blocks(y * scale.double(), size))
    pairs = u_statistic(*units)
    wanted = {"delta_h1_pairs": -RATE * pairs.value, "delta_h1_pairs_plain": -RATE * pairs.plain}
    wanted |= {"delta_h1_pairs_plugin_stderr": RATE * pairs.plug_in} if plug_in else {}
    wanted |= {"delta_h1_pairs_jackknife_stderr": RATE * pairs.jackknife} if jackknife else {}
    assert found == pytest.approx(wanted, rel=1e-12)


def test_two_units_have_no_jackknife():
    probe = a_probe(batch_config={"B": 2}, probe_config={"one_batch": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe_module, "preconditioner", lambda *_: torch.ones(1))
        found = probe._ascent(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [5.0]]))
    assert set(found) == {"delta_h1_pairs", "delta_h1_pairs_plain", "delta_h1_pairs_plugin_stderr"}


@pytest.mark.parametrize(("one", "number", "needed"), [(False, 5, 6), (True, 2, 3)])
def test_too_few_prompts(one, number, needed):
    with pytest.raises(InputError, match=f"prompts: got {number}; allowed: at least {needed}"):
        a_probe(probe_config={"one_batch": one}).run(prompts(number), reward)


@pytest.mark.parametrize("one", [False, True])
def test_a_gradient_is_of_the_updates_prompts_and_is_taken_away_again(one):
    probe, seen, kept = a_probe(probe_config={"one_batch": one}), [], []
    for p in trained_parameters(policy()):
        p.grad = torch.ones_like(p)

    def gradient(some, generator):
        seen.append((some.ids, generator))
        assert all(p.grad is None for p in trained_parameters(policy()))
        torch.rand(1)
        for p in trained_parameters(policy()):
            p.grad = torch.full_like(p, 2.0)
            kept.append(p.grad)

    generator, random = torch.Generator(), torch.get_rng_state()
    y, loss, rewards = probe._update(prompts(), None, None, gradient, generator)
    rows = slice(B) if one else slice(B, 2 * B)
    assert torch.equal(seen[0][0], prompts().ids[rows]) and seen[0][1] is generator
    assert y is None and rewards is None and all(a is b for a, b in zip(loss, kept, strict=True))
    assert all((p.grad == 1).all() for p in trained_parameters(policy())), "the gradients of before"
    assert torch.equal(torch.get_rng_state(), random)

    def half(some, generator):
        for p in trained_parameters(policy())[1:]:
            p.grad = torch.ones_like(p)

    with pytest.raises(ValueError, match="without .grad"):
        probe._update(prompts(), None, None, half, generator)
    optimizer().zero_grad(set_to_none=True)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_reward_that_is_not_finite_is_refused(value):
    def wrong(some, ids, mask):
        return torch.tensor([value] + [1.0] * (len(ids) - 1))

    with pytest.raises(InputError, match="reward: got 'NaN or infinity'"):
        a_probe().run(prompts(), wrong)


def test_rewards_are_computed_in_parts_without_a_graph():
    sizes, graphs = [], []

    def noted(some, ids, mask):
        sizes.append(len(ids)), graphs.append(torch.is_grad_enabled())
        return reward(some, ids, mask)

    generator = torch.Generator().manual_seed(0)
    probe = a_probe(memory_config={"importance_microbatch_size": 5})
    evaluation = drawn(prompts()[:B], generator)
    _, _, rewards = probe._update(prompts(), evaluation, noted, None, generator)
    assert sizes == [5, 5, 2] and not any(graphs) and rewards.dtype == torch.float64
    assert_close(rewards, pieces().rewards)


def test_sizes_and_settings_are_passed_on(monkeypatch):
    asked = {}
    for name in ("draw", "scores_at", "prompt_gradients", "directional", "adamw_update"):
        inner = getattr(probe_module, name)

        def note(*args, inner=inner, name=name, **options):
            asked.setdefault(name, []).append((args, options))
            return inner(*args, **options)

        monkeypatch.setattr(probe_module, name, note)
    probe = a_probe(
        batch_config={"B": B, "G": G, "rollout_batch_size": 7}, generation={"max_new_tokens": T, "temperature": 0.5},
        memory_config={"teacher_force_microbatch_size": 3, "importance_microbatch_size": 5}, max_grad_norm=0.25, seed=9,
    )  # fmt: skip
    figures = probe.run(prompts(), reward).figures
    assert [args[2:4] + args[5:] for args, _ in asked["draw"]] == [(G, T, 0.5, 7)] * 2
    assert {args[4].initial_seed() for args, _ in asked["draw"]} == {9}
    assert [options["microbatch"] for _, options in asked["scores_at"]] == [5, 5]
    assert [args[3] for args, _ in asked["prompt_gradients"]] == [3, 3]
    assert asked["directional"][0][0][3] == 5 and asked["adamw_update"][0][0][3:] == (0.25, False)
    assert figures["clipped"] < 1
    assert a_probe(max_grad_norm=0.0).run(prompts(), reward).figures["clipped"] == 1.0
    assert asked["adamw_update"][1][0][3:] == (None, False)


@pytest.mark.parametrize("real", [False, True])
def test_sampled_anew_are_completions_of_the_policy_after_the_step(real):
    sampling = {"step": "optimizer" if real else "functional", "ess_threshold": 1.0}
    report = a_probe(importance_sampling=sampling).run(prompts(), reward)
    p = pieces()
    vector, old = step_of(p.loss), p.old
    assert report.figures["resampled"] == 1.0
    with moved(policy(), vector.total, 1.0):
        fresh = drawn(prompts()[:B], torch.Generator().manual_seed(0))
        new = scores_at(policy(), fresh)
    change = Estimate.of((new.entropies.sum(-1) - old.entropies.sum(-1)).mean(1))
    tokens = new.entropies.sum() / fresh.mask.sum() - old.entropies.sum() / p.evaluation.mask.sum()
    same(report.figures, {
        "entropy_after": float(new.entropies.sum(-1).mean()), "delta_h": change.mean, "delta_h_stderr": change.stderr,
        "delta_h_per_token": float(tokens),
    })  # fmt: skip
    assert abs(change.mean) > 1e-6


@pytest.mark.parametrize(("ess", "low"), [(5.9, True), (6.0, False), (6.1, False)])
def test_effective_samples_are_few_below_the_threshold(ess, low):
    assert a_probe()._low(ess, SimpleNamespace(logps=torch.zeros(B, G, T))) is low  # half of 12


def test_multiples_of_the_learning_rate_and_clipped_weights():
    sampling = {"clip": 1.01, "resample_on_low_ess": False}
    report = a_probe(probe_config={"multiples": [30.0, 2.0]}, importance_sampling=sampling).run(prompts(), reward)
    p = pieces()
    vector, old = step_of(p.loss).total, p.old
    terms = directional(policy(), p.evaluation, vector)
    assert [row["multiple"] for row in report.sweep] == [2.0, 30.0]
    for row in report.sweep:
        new = scores_at(policy(), p.evaluation, vector, row["multiple"])
        change = reweighted_change(
            *(z.sum(-1) for z in (old.logps, new.logps, old.entropies, new.entropies)), None, 1.01
        )
        by_prefix = prefix_change(old.logps, new.logps, old.entropies, new.entropies)
        forward = Estimate.of(row["multiple"] * terms.per_sequence().mean(1))
        linear = linearity_error(row["multiple"] * terms.per_sequence(), by_prefix)
        same(row, {
            "delta_h1_forward": forward.mean, "delta_h1_forward_stderr": forward.stderr, "delta_h": change.change,
            "delta_h_stderr": change.stderr, "ess_share": change.ess / (B * G),
            "delta_h_prefix": float(by_prefix.mean()), "linearity_error": linear[0],
            "linearity_error_stderr": linear[1],
        })  # fmt: skip
    assert report.figures["clipped_weights"] > 0


def test_the_parts_of_a_prediction_by_hand():
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]])
    vector = UpdateVector(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.tensor([-0.5, 1.0]), 0.75)
    assert a_probe()._predicted(x, vector) == pytest.approx(
        {
            "delta_h1": -(6.5 - 1.5) / 2, "delta_h1_stderr": 4.0, "delta_h1_momentum": -2.0,
            "delta_h1_gradient": -1.0, "delta_h1_decay": 0.5, "clipped": 0.75, "update_norm": math.hypot(0.5, 3.0),
        }
    )  # fmt: skip


def test_phases_are_timed_and_measured_when_asked_for(monkeypatch):
    times = iter([10.0, 12.5, 20.0, 21.0])
    monkeypatch.setattr(probe_module.time, "perf_counter", lambda: next(times))
    probe = a_probe()
    for name in ("a", "b"):
        with probe._phase(name):
            pass
    assert probe._seconds == {"a": 2.5, "b": 1.0} and probe._peaks == {}
    monkeypatch.undo()
    probe = a_probe(memory_config={"profile_memory": True})
    with probe._phase("a"):
        kept = torch.ones(1024)
    assert probe._peaks == {"a": 4096} and kept.numel() == 1024


def test_unfused_attention_is_noted_where_it_replaced_fused_one(monkeypatch):
    assert len(a_probe()._notes()) == 1
    monkeypatch.setattr(policy().model.config, "_attn_implementation", "eager")
    assert a_probe()._notes() == []


def test_equal_rewards_of_some_prompts_are_no_reason_to_warn():
    figures = {"ess": 12.0, "samples": 12, "resampled": 0.0}
    for rewards, warned in (([[1, 1], [2, 2]], True), ([[1, 1], [2, 1]], False), ([[0, 1], [2, 2]], False)):
        assert bool(a_probe()._warnings(figures, torch.tensor(rewards))) == warned
    assert a_probe()._warnings(figures | {"pareto_k": 0.7}, None) == []


# --- from a config


def test_a_runs_gradient_is_its_engines_batch_by_batch(monkeypatch):
    made, calls = [], []

    def make_engine(*args):
        made.append(args)
        return lambda *args: calls.append(args)

    monkeypatch.setattr(run, "make_engine", make_engine)
    settings = {"method": "ste", "hops": 3, "hop_tolerance": 0.125, "beta": 0.3, "reward_scope": "completion",
                "tau_start": 2.0, "tau_end": 1.0, "tau_anneal_steps": 4, "per_device_train_batch_size": 4}  # fmt: skip
    config, generator = TrainConfig.parse(settings), torch.Generator()
    for step, options in ((0, {}), (1, {"step": 1})):
        calls.clear()
        reward_gradient(policy(), "reward", config, **options)(prompts(10), generator)
        assert [len(call[1]) for call in calls] == [4, 4, 2]
        assert [call[5] for call in calls] == [0.4, 0.4, 0.2]
        assert torch.equal(torch.cat([call[1].ids for call in calls]), prompts(10).ids)
        for used, _, objective, relaxation, noise, _ in calls:
            assert used is policy() and noise is generator and relaxation.tau == 2.0 - step / 4
            assert (objective.reward_model, objective.beta, objective.scope) == ("reward", 0.3, "completion")
    assert made == [("replay", 3, 0.125, bool(config.gradient_checkpointing))] * 2
    with pytest.raises(InputError, match="method: got 'grpo'; allowed: one that relaxes tokens"):
        reward_gradient(policy(), "reward", TrainConfig.parse({"method": "grpo"}))


class Model:
    """A reward model that remembers where it is."""

    def to(self, device):
        self.device = device
        return self


@pytest.mark.parametrize(("one", "number"), [(False, 6), (True, 3)])
@pytest.mark.parametrize("follow", [[], ["train.yaml"]])
def test_a_task_of_reviews_has_the_prompts_of_its_batches(one, number, follow, monkeypatch):
    asked = {}
    reviews = [SimpleNamespace(text=f"Number {i}. Two. Three.") for i in range(20)]
    monkeypatch.setattr(run, "load_reviews", lambda *args: asked.setdefault("reviews", args) and reviews)
    monkeypatch.setattr(run, "load_reward", lambda *args: asked.setdefault("reward", args) and Model())
    monkeypatch.setattr(run, "encode_prompts", lambda *args: args)
    monkeypatch.setattr(run, "reward_gradient", lambda *args: ("gradient", *args))
    monkeypatch.setattr(run.TrainConfig, "load", lambda files: ("config", files))
    config = ProbeRunConfig.parse({
        "batch_config": {"B": B}, "probe_config": {"one_batch": one}, "reviews": "split", "reward": "bag",
        "max_prompt_tokens": 7, "follow": follow, "reward_scope": "completion",
    })  # fmt: skip
    base = SimpleNamespace(tokenizer="tokenizer", device="here")
    (tokenizer, texts, longest), update = probe_task(config, base)
    assert (tokenizer, longest) == ("tokenizer", 7) and texts == [f"Number {i}. Two" for i in range(number)]
    assert asked == {"reviews": ("split", "validation"), "reward": ("bag", base)}
    if follow:
        assert update["gradient"][0] == "gradient" and update["gradient"][3] == ("config", follow)
        assert update["gradient"][2].device == "here" and set(update) == {"gradient"}
    else:
        score = update["reward"]
        assert score.func.__name__ == "score" and score.args == (base,) and set(update) == {"reward"}
        assert score.func.__self__.scope == "completion" and score.func.__self__.reward_model.device == "here"


@pytest.mark.parametrize(("one", "number"), [(False, 6), (True, 3)])
def test_a_task_of_sums_is_scored_by_its_verifier(one, number, monkeypatch):
    asked = []

    class Problems:
        prompts = staticmethod(lambda *args: ("prompts", *args))
        reward = staticmethod(lambda *args: ("reward", *args))

    monkeypatch.setattr(run.Problems, "make", lambda *args: asked.append(args) or Problems)
    values = {"task": "arithmetic", "batch_config": {"B": B}, "probe_config": {"one_batch": one}, "seed": 5}
    some, update = probe_task(ProbeRunConfig.parse(values), SimpleNamespace(tokenizer="tokenizer"))
    assert asked == [(number, 5)] and some == ("prompts", "tokenizer", 12)
    assert update["reward"]("p", "ids", "mask") == ("reward", "tokenizer", "p", "ids", "mask")


def test_an_optimizer_has_the_configs_rates_and_a_saved_states_moments(tmp_path):
    config = ProbeRunConfig.parse({"learning_rate": 0.125, "weight_decay": 0.5})
    fresh = make_optimizer(config, policy(), None)
    assert not fresh.state and [group["lr"] for group in fresh.param_groups] == [0.125]
    torch.save(optimizer().state_dict(), tmp_path / "optimizer.pt")
    made = make_optimizer(config, policy(), tmp_path / "optimizer.pt")
    assert [(group["lr"], group["weight_decay"]) for group in made.param_groups] == [(0.125, 0.5)]
    for p in trained_parameters(policy()):
        assert torch.equal(made.state[p]["exp_avg"], optimizer().state[p]["exp_avg"])


@pytest.mark.parametrize(
    ("adapter", "saved", "given", "used"),
    [(False, False, False, None), (True, False, False, None), (True, True, False, "own"), (True, True, True, "given"),
     (False, True, True, "given")],
)  # fmt: skip
def test_a_probe_of_an_adapter_takes_its_optimizers_state(adapter, saved, given, used, tmp_path, monkeypatch):
    asked = {}
    if saved:
        (tmp_path / "optimizer.pt").write_text("state")
    monkeypatch.setattr(run.Backbone, "load", lambda *args: asked.setdefault("base", args) and "policy")
    monkeypatch.setattr(run, "probe_task", lambda *args: ("prompts", {"reward": "score"}))
    monkeypatch.setattr(run, "make_optimizer", lambda *args: asked.setdefault("optimizer", args) and "optimizer")

    class Probe:
        def __init__(self, *args, **options):
            asked["probe"] = (*args, options)

        def run(self, *args, **options):
            return (*args, options)

    monkeypatch.setattr(run, "EntropyProbe", Probe)
    config = ProbeRunConfig.parse({"backbone": "base", "dtype": "float64"})
    folder = tmp_path if adapter else None
    state = "given.pt" if given else None
    assert probe_adapter(config, folder, state) == ("prompts", {"reward": "score"})
    where = {"own": tmp_path / "optimizer.pt", "given": "given.pt", None: None}[used]
    assert asked["base"] == ("base", "float64", None if adapter else config.lora, folder, "cpu")
    assert asked["optimizer"] == (config, "policy", where)
    assert asked["probe"] == ("policy", "optimizer", config, {"allow_fresh": where is None})


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match="device: got 'cuda'; allowed: cpu"):
        probe_adapter(ProbeRunConfig.parse({"device": "cuda"}), None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(run.Backbone, "load", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        probe_adapter(ProbeRunConfig.parse({"device": "cuda"}), None)
