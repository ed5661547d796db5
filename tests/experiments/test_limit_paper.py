"""Verdicts follow from the figures; the paper's defects against hand arithmetic."""

import pytest

from grade.experiments.limit import defects, paper
from grade.experiments.limit.claims import paper_claims
from grade.experiments.setting import make_setting
from grade.training.toy import toy_reviews, toy_task

DEFECTS = ("scope_difference", "spread_ste", "spread_reinforce", "relative_variance_ste", "relative_variance_reinforce")
MEASURED = dict.fromkeys([f"defects/{name}" for name in DEFECTS], 1.0) | {
    "defects/kl_aligned_max": 1e-7, "defects/kl_late": 3.0, "defects/loss_plus_reward": 0.0, "untrained/reward": 1.0,
    "gain/ste": 0.2, "gain/ste_stderr": 0.01, "gain/ste_n": 5,
    "gain/ppo": 0.02, "gain/ppo_stderr": 0.01, "gain/ppo_n": 5,
}  # fmt: skip


def verdict(words, changes=MEASURED):
    (claim,) = [c for c in paper_claims(MEASURED | changes, 5) if c.claim.startswith(words)]
    return claim.verdict


@pytest.mark.parametrize(
    ("difference", "p", "n", "want"),
    [
        (0.1, 0.01, 5, "confirmed"),
        (-0.1, 0.01, 5, "refuted"),
        (0.1, 0.0101, 5, "not testable"),  # another run may put it on the other side of any threshold
        (-0.1, 0.0999, 5, "not testable"),
        (0.1, 0.1, 5, "partly"),
        (0.1, 0.001, 4, "not testable"),
    ],
)
def test_a_comparison_is_decided_from_five_seeds_and_away_from_the_threshold(difference, p, n, want):
    words = "GRADE-STE beats PPO, 0.763 to 0.510: at a KL of 5"
    for pair, sign in (("ste_minus_ppo", 1), ("ppo_minus_ste", -1)):  # the same test, stored the other way round
        key = f"paired/{pair}/kl5"
        figures = {key: sign * difference, f"{key}_stderr": 0.01, f"{key}_n": n, f"{key}_p": p}
        assert verdict(words, figures) == want
    assert verdict(words) == "not testable"


def test_a_gain_counts_from_three_standard_errors_and_from_two_seeds_from_ten():
    for gain, n, want in ((0.02, 5, "partly"), (0.04, 5, "refuted"), (-0.04, 5, "confirmed"), (0.09, 2, "partly"),
                          (0.11, 2, "refuted")):  # fmt: skip
        assert verdict("PPO ends below", {"gain/ppo": gain, "gain/ppo_n": n}) == want
    assert verdict("GRADE-STE learns") == "confirmed"


def test_the_verdict_on_variance_is_on_noise_and_not_on_the_spread_of_norms():
    words = "GRADE-STE's gradient variance"
    assert verdict(words, {"defects/relative_variance_ste": 2.0, "defects/spread_reinforce": 14.6}) == "refuted"
    assert verdict(words, {"defects/relative_variance_reinforce": 14.0}) == "confirmed"


def test_advantages_over_the_batch_leak_into_another_completion():
    coded, meant = paper.gae_example(True), paper.gae_example(False)
    # Row 1 (no reward, V = 0.5) has -0.5 everywhere; row 0: 0 + 0.99 * 0.5 - 0.5 + 0.99 * 0.95 * (-0.5) = -0.47525.
    assert coded.tolist() == pytest.approx([-0.47525] * 7 + [0.52475])
    # Over time the last advantage is 1 - 0.5; before it, 0.99 * 0.5 - 0.5 + 0.9405 * 0.5 = 0.46525, and so on.
    assert meant[-2:].tolist() == pytest.approx([0.46525, 0.5]) and (meant > 0).all()


def test_kl_is_in_the_loss_with_the_weight_that_was_asked_for():
    task = toy_task(dtype="float64")
    texts = [r.text for r in toy_reviews(20, seed=1)]
    setting = make_setting(task.backbone, task.reward_model, texts, 2, 3, 4, 16)
    once, twice = (defects.loss_plus_reward(setting, beta) for beta in (1.0, 2.0))
    assert defects.loss_plus_reward(setting, 0.0) == pytest.approx(0.0, abs=1e-15)
    assert once > 1e-6 and twice == pytest.approx(2 * once, rel=1e-9)
