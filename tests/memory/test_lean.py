"""Chunks of logits: as large as a bound allows, and a lean step of a large model that is lean."""

from grade.experiments.scale.measure.tables import TABLES, Settings


def test_the_lean_step_of_qwen3_4b_needs_a_fifth_of_a_gib_over_its_weights():
    table = TABLES["lean"](Settings(model="qwen3-4b", lean_batch=2, lean_tokens=32)).set_index("phase")
    assert table.over_weights_gib["step"] == table.over_weights_gib.max() <= 0.2
    assert table.weights_bytes["step"] == table.weights_bytes["rollout"]
    # Parameters of 2 bytes in blocks of 512, and the rotary table.
    assert 8_044_936_192 <= table.weights_bytes["step"] <= 8_044_936_192 * 1.0001
