"""Figures of the experiment on any reward, from its tables."""

from grade.experiments import learning
from grade.experiments.any_reward.measure.tables import Settings
from grade.experiments.frontier import paired_figures
from grade.experiments.measured import Tables, figures_of, finite

Values = dict[str, float | int | None]


def metrics(tables: Tables, settings: Settings) -> Values:
    """Samples of `auto` over `rloo`'s, and differences of reward at equal KL; an interval that does not exist is None.

    Subjects are named as in `learning.subject_names`. Samples are those at the target ``headline_kl`` and the most
    completions per step.
    """
    ratios = learning.ratio_table(tables["runs"])
    ratios = ratios.query("most and method == 'auto' and target_kl == @settings.headline_kl")
    samples, of_samples = "samples_over_rloo/{subject}", {"_censored": "censored", "_of_run": "of_run"}
    figures = figures_of(ratios, samples, {"_n": "n"})
    figures |= figures_of(ratios.query("n > 0"), samples, {"": "ratio", "_low": "low", "_high": "high"} | of_samples)
    pairs = learning.paired_rewards(tables["runs"], settings.headline_level)
    return finite(figures | paired_figures(pairs, "paired/{subject}/{method}_minus_{against}"))
