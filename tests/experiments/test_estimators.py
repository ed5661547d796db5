"""The study on a toy policy: figures that must be what they say, whatever the noise."""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_gpt2

from grade.errors import InputError
from grade.experiments.estimators.figures import (
    bias_variance_figure,
    cosine_figure,
    family,
    hybrid_figure,
    label,
    line_styles,
    mark_crossover,
    plot_bias_variance,
    plot_cosines,
    plot_hybrid,
    plot_spread,
    plot_worth,
    worth_figure,
)
from grade.experiments.estimators.measure import study
from grade.experiments.estimators.measure.enumerated import quality_table
from grade.experiments.estimators.measure.rows import Variant, gradient_rows
from grade.experiments.estimators.measure.tables import Measurements, Settings
from grade.experiments.estimators.metrics import metrics, timed_metrics
from grade.experiments.measured import Tables, measure_all
from grade.rewards.shallow import ShallowReward, first_layers
from grade.training.toy import toy_reviews, toy_task

STE = Variant("ste", 1.0, 0, 16)


@pytest.fixture(scope="module")
def setting():
    return study.load_setting("", "", "", {}, [1], [STE], 2, 4, 4, 4, depth_reviews=40)


@pytest.fixture(scope="module")
def rows(setting):
    return gradient_rows(setting, 12)


@pytest.fixture(scope="module")
def settings():
    return Settings(tiny_rows=3, tiny_group=4, tiny_draws=[2], depth_reviews=40, hops=[0])


@pytest.fixture(scope="module")
def tables(settings):
    return Tables(Measurements(settings))


def test_policies_are_those_before_and_after_training():
    after = Settings(policies=["after"], runs_dir="runs", trained_run="ste-1")
    assert after.adapters == {"after": "runs/ste-1/adapter"} and Settings().adapters == {"before": ""}
    for policies in ([], ["befor"], ["before", "then"]):
        with pytest.raises(InputError, match="policies"):
            Settings.parse({"policies": policies}, "estimators.yaml")
    # Without a folder, a fresh adapter would pass for a trained one.
    with pytest.raises(InputError, match="^runs_dir"):
        _ = Settings(policies=["before", "after"]).adapters


def test_the_enumerated_part_can_be_left_out():
    measurements = Measurements(Settings(enumerated=False))
    assert measurements.tables == ("worth", "cosine", "hybrid", "spread") and measurements.timed == ("speed",)
    assert Measurements(Settings()).tables[:2] == ("quality", "mse_ratio")


def test_written_tables_give_the_metrics_and_figures_of_measured_ones(settings, tables, tmp_path):
    measured = metrics(tables, settings)
    for reward in ("bag", "trunk", "trunk1"):
        for key in ("worth/{}", "worth/{}_low", "crossover/{}", "hybrid/{}/8", "hybrid/{}/64_high"):
            assert key.format(reward) in measured
    assert all(value is None or math.isfinite(value) for value in measured.values())
    assert measured["bias/samples"] == 3 * 8 and measured["worth/samples"] == 12 * 8
    assert not any("second" in key for key in measured)
    assert set(timed_metrics(tables, settings)) >= {"worth_per_second/bag", "estimators/bag/rloo/milliseconds"}
    measure_all(tables._measurements, tmp_path, log=lambda line: None)
    read = Tables(Measurements(settings), str(tmp_path / "measured"))
    assert metrics(read, settings) == measured
    drawn = [bias_variance_figure(read["quality"], ["bag", "trunk"], 16), worth_figure(read["worth"], settings.rewards),
             cosine_figure(read["cosine"], settings.rewards, ["rloo"], {("before", "bag"): 30.0}),
             hybrid_figure(read["hybrid"], settings.rewards)]  # fmt: skip
    for fig, panels in zip(drawn, (2, 1, 3, 1), strict=True):
        assert len(fig.axes) == panels and fig.get_suptitle() and len(fig.legends) == 1
        fig.savefig(tmp_path / "figure.png")
    plt.close("all")


def test_figures_without_the_enumerated_part_have_its_metrics_left_out(tables):
    found = metrics(tables, Settings(enumerated=False, hops=[0]))
    assert "worth/bag" in found and not any(key.startswith(("bias/", "mse/")) for key in found)


def test_names_after_training_begin_with_after(tables, settings):
    moved = {name: tables[name].assign(policy="after") for name in ("worth", "hybrid", "spread", "speed")}
    moved |= {name: tables[name] for name in ("quality", "mse_ratio")}
    before, after = metrics(tables, settings), metrics(moved, settings)
    kept = ("bias/", "mse/")
    assert set(after) == {key if key.startswith(kept) else f"after/{key}" for key in before}
    assert after["after/worth/bag"] == before["worth/bag"]


def test_a_label_says_what_an_id_means():
    assert label("gumbel_rao_m8_tau1_hops0") == "gumbel_rao, 8 draws, tau 1"
    assert label("gumbel_rao_m1_tau1_hops2") == "gumbel_rao, 1 draw, tau 1, 2 hops"
    assert label("ste_tau0.5_k64_hops1") == "ste, tau 0.5, K 64, 1 hop"
    assert [label(name) for name in ("rloo", "reinforce")] == ["rloo", "reinforce"]
    for variant in Settings().variants:
        assert family(variant.name) == variant.estimator


def test_rows_are_of_every_reward_and_reproducible(setting, rows):
    assert set(rows.gradients) == {(r, e) for r in ("bag", "trunk", "trunk1") for e in ("rloo", STE.name)}
    assert rows.size == 8 and rows.group == 4 and min(rows.seconds.values()) > 0
    again = gradient_rows(setting, 1)
    for key, value in again.gradients.items():
        torch.testing.assert_close(value[0], rows.gradients[key][0])
        assert not torch.equal(rows.gradients[key][0], rows.gradients[key][1])
        # Norms are of the parameter tensors; nothing is sketched at this size.
        torch.testing.assert_close(rows.norms[key].norm(dim=1), rows.gradients[key].norm(dim=1))


def test_the_unbiased_estimator_is_worth_itself(rows):
    table = study.summary(rows).set_index(["reward", "estimator"])
    assert table.worth.xs("rloo", level=1).tolist() == pytest.approx([1, 1, 1])
    assert (table.n == 96).all()
    speed = study.speed_table(rows).set_index(["reward", "estimator"])
    assert speed.worth_per_second.xs("rloo", level=1).tolist() == pytest.approx([1, 1, 1])
    assert (speed.milliseconds > 0).all()


def test_cosines_grow_with_the_batch(rows):
    curves = study.cosine_curves(rows, [1, 4, 16])
    curves = curves[(curves.reward == "bag") & (curves.estimator == STE.name)]
    assert curves.cosine.is_monotonic_increasing and curves.cosine.iloc[0] > 0


def test_the_papers_spread_is_the_mean_over_steps_of_numpys_std(rows):
    table = study.spread_table(rows).set_index(["reward", "estimator"])
    want = np.mean([np.std(row) for row in rows.norms["bag", "rloo"].numpy()])
    assert table.tensor_spread["bag", "rloo"] == pytest.approx(want)
    variance = rows.gradients["bag", "rloo"].double().var(0).sum()
    assert table.sd["bag", "rloo"] == pytest.approx(math.sqrt(variance))


@pytest.mark.parametrize("config", [None, tiny_gpt2()])
def test_a_cut_base_is_its_first_layers_and_is_whole_again(config):
    names = {} if config is None else dict(target_modules=["c_attn"])
    backbone, prompts = make_backbone(config, **names), make_prompts()
    embeds = backbone.embed(prompts.ids)
    with torch.no_grad():
        want = backbone.hidden(embeds, prompts.mask)
        with first_layers(backbone, 2):
            torch.testing.assert_close(backbone.hidden(embeds, prompts.mask), want)
        layers = getattr(backbone.decoder, "layers", None) or backbone.decoder.h
        seen = []
        keep = lambda _, __, out: seen.append(out[0] if isinstance(out, tuple) else out)  # noqa: E731
        hook = layers[0].register_forward_hook(keep)
        norm = getattr(backbone.decoder, "norm", None) or backbone.decoder.ln_f
        with first_layers(backbone, 1):
            got = backbone.hidden(embeds, prompts.mask)
        hook.remove()
        torch.testing.assert_close(got, norm(seen[0]))
        torch.testing.assert_close(backbone.hidden(embeds, prompts.mask), want)
    with pytest.raises(InputError, match="depth: got 3; allowed: 1 to 2 layers"), first_layers(backbone, 3):
        pass


def test_a_shallow_reward_reads_its_layers_alone_and_has_a_gradient():
    backbone = toy_task().backbone
    model = ShallowReward(backbone, 1, toy_reviews(60, 2), toy_reviews(20, 3), tokens=12)
    ids = torch.randint(3, 300, (2, 6), generator=torch.Generator().manual_seed(0))
    embeds, mask = backbone.embed(ids).detach().requires_grad_(), torch.ones_like(ids)
    reward = model(embeds, mask)
    (grad,) = torch.autograd.grad(reward.sum(), embeds)
    assert ((reward > 0) & (reward < 1)).all() and (grad != 0).any(-1).all()
    for depth, same in ((1, True), (0, False)):
        with torch.no_grad():
            for p in backbone.decoder.layers[depth].mlp.parameters():
                p.mul_(2)
        assert torch.equal(model(embeds, mask), reward) == same


def test_figures_draw_what_they_are_given(rows):
    fig, axes = plt.subplots(1, 4)
    table = quality_table(rows, {r: rows.gradients[r, "rloo"].mean(0) for r in ("bag", "trunk", "trunk1")})
    assert len(plot_bias_variance(axes[0], table[table.reward == "bag"]).get_yticklabels()) == 2
    curves = study.cosine_curves(rows, [1, 10, 100])
    curves = curves[curves.reward == "bag"]
    styles = line_styles(["rloo", STE.name])
    assert len(plot_cosines(axes[1], curves, ["rloo"], styles).lines) == 2
    lost = curves.assign(cosine=np.nan)
    assert "lost in the noise" in plot_cosines(plt.figure().gca(), lost, [], styles).texts[0].get_text()
    assert len(mark_crossover(axes[1], 30.0).lines) == 3 and len(mark_crossover(axes[1], math.inf).lines) == 3
    blend = study.hybrid_table(rows, STE.name, [8, 64])
    assert blend.reward.tolist() == [reward for reward in ("bag", "trunk", "trunk1") for _ in range(2)]
    assert [t.get_text() for t in plot_hybrid(axes[2], blend, ["bag"]).get_xticklabels()] == ["8", "64"]
    spread = study.spread_table(rows)
    shown = spread[np.isfinite(spread.relative)]
    points = [line.get_xydata()[0].tolist() for line in plot_spread(axes[3], spread).lines]
    assert points == shown[["tensor_spread", "relative"]].to_numpy().tolist()
    labels = {text.get_text() for text in axes[3].get_legend().get_texts()}
    assert labels == {"ste", "rloo", "reward bag", "reward trunk", "reward trunk1"}
    plt.close("all")
    thick, thin, dashed = line_styles(["ste_tau1_hops0", "ste_tau1_hops1", "ste_tau2_hops0"]).values()
    assert thick["linestyle"] == thin["linestyle"] != dashed["linestyle"] and thick["linewidth"] > thin["linewidth"]


def test_the_figure_of_worth_shows_each_relaxed_estimator_at_its_reward():
    table = pd.DataFrame([
        ("bag", "rloo", 1.0, 1.0, 1.0), ("trunk", "rloo", 1.0, 1.0, 1.0),
        ("bag", "ste_tau1_hops0", 30.0, 10.0, 90.0), ("trunk", "ste_tau1_hops0", 0.0, 0.0, 0.5),
        ("bag", "gumbel_tau1_hops0", 20.0, None, None), ("trunk", "gumbel_tau1_hops0", 0.5, 0.2, 1.5),
    ], columns=["reward", "estimator", "worth", "worth_low", "worth_high"])  # fmt: skip
    _, ax = plt.subplots()
    containers = plot_worth(ax, table, ["trunk", "bag"]).containers
    assert [c.get_label() for c in containers] == ["ste, tau 1", "gumbel, tau 1"]
    points, _, (bars,) = containers[0].lines
    assert points.get_ydata().tolist() == [0.0, 30.0] and points.get_xdata().round().tolist() == [0, 1]
    assert [segment[:, 1].tolist() for segment in bars.get_segments()] == [[0.0, 0.5], [10.0, 90.0]]
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["trunk", "bag"]
    plt.close("all")


def test_too_few_reviews_are_named():
    with pytest.raises(InputError, match="depth_reviews: got 200; allowed: less than 200"):
        study.load_setting("", "", "", {}, [1], [STE], 2, 4, 4, 4, depth_reviews=200)
    with pytest.raises(InputError, match="prompts: got 65; allowed: at most 64"):
        study.load_setting("", "", "", {}, [], [STE], 65, 4, 4, 4)
