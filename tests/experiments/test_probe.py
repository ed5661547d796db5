"""The probe on a policy, and document 003: three ways to one gradient, memory, verdicts that follow the figures."""

import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_gpt2

from grade.config_files import load_config
from grade.entropy.run import ProbeRunConfig
from grade.entropy.samples import draw, entropy_coefficients, prompt_gradients, sequence_logps
from grade.errors import InputError
from grade.experiments.probe.measure import proposals
from grade.experiments.probe.measure import tables as experiment
from grade.experiments.probe.measure.proposals import ProbeStepConfig, held_gradient, missing_mask_error
from grade.experiments.probe.metrics import probe_claims
from grade.memory.compare import measure
from grade.memory.shapes import QWEN25_1_5B
from grade.memory.trace import trace
from grade.models.prompts import PromptBatch

TINY = dict(model="tiny", prompt_tokens=4, max_new_tokens=6, dtype="float32", microbatch_size=1)


def step_bytes(batch, group, way, **rest):
    return trace(ProbeStepConfig(**TINY | rest, batch_size=batch, num_generations=group, way=way)).step_bytes


def test_three_ways_give_one_gradient():
    backbone = make_backbone(tiny_gpt2(), target_modules=["c_attn"])  # norms exact in float64
    samples = draw(backbone, make_prompts(), 3, 4, torch.Generator().manual_seed(0))
    streamed = prompt_gradients(backbone, samples, entropy_coefficients(sequence_logps(backbone, samples)))
    for chunk in (None, 1, 2):
        torch.testing.assert_close(held_gradient(backbone, samples, chunk), streamed.mean(0))


def test_only_streaming_makes_the_peak_independent_of_the_number_of_completions():
    small, large = (step_bytes(n, n, "streamed") for n in (2, 4))
    assert large <= 1.05 * small
    # 16 completions' graphs at once against one's; what does not grow with them is a few in a hundred of the whole.
    assert step_bytes(4, 4, "chunked") > 0.98 * step_bytes(4, 4, "whole") > 4 * large


def test_the_traced_peak_is_the_real_one():
    for way in ("whole", "streamed"):
        config = ProbeStepConfig(**TINY, batch_size=2, num_generations=3, way=way)
        # 2 %: samples move from the CPU to the device, which on a CPU copies nothing.
        assert trace(config, device="cpu").peak == pytest.approx(measure(config)["measured_peak_bytes"], rel=0.02)


def test_what_the_other_proposals_do():
    kept = proposals.saved_by_log_probabilities()
    assert kept["log_softmax"] == pytest.approx(1, abs=0.02) and kept["cross_entropy"] == pytest.approx(1, abs=0.02)
    assert proposals.proposed_buffer_error() == "TypeError"
    left = proposals.restore_errors()
    assert left["as_coded"] == pytest.approx(1e-2, rel=0.1)  # the first AdamW step is the learning rate, and decay
    assert left["parameters_only"] > 1e-6 and left["everything"] == 0


def test_narrow_logits_and_missing_masks_are_measured():
    backbone = make_backbone(dtype=torch.float32)
    prompts = PromptBatch(make_prompts().ids.clamp_min(3), torch.ones_like(make_prompts().ids))
    ids = torch.randint(3, 23, (3, 4), generator=torch.Generator().manual_seed(0))
    error = proposals.narrow_log_probability_error(backbone, prompts, ids)
    assert 1e-4 < error["token_max"] and 0 < error["sequence_max"] <= 4 * error["token_max"]  # 4 tokens
    assert missing_mask_error(backbone, prompts, ids, padding=0) < 1e-5 < missing_mask_error(backbone, prompts, ids, 3)


def test_document_003_has_its_verdicts():
    figures = {f"probe/traced_{way}_peak_gb": 10.0 for way in ("whole", "chunked", "streamed")}
    names = ("streamed_grad_rel_diff", "saved_cross_entropy", "saved_log_softmax", "narrow_token_max",
             "narrow_sequence_max", "missing_mask_error", "restore_as_coded", "restore_parameters_only")  # fmt: skip
    figures |= {f"probe/{name}": 1.0 for name in names}
    figures |= {"probe/buffer_error": "TypeError", "probe/restore_everything": 0}
    claims = {c.claim: c for c in probe_claims(QWEN25_1_5B, figures)}
    assert len(claims) == 13
    million = claims["3: more than 50 M trained parameters means that the base is trained"].found
    assert million == pytest.approx(73.859072)
    assert claims["the main cause is the gradient path of one prompt"].found == 256 * 200 * 151_936 * 4 / 1e9
    name = "1: scoring G completions in chunks lowers the peak"
    assert claims[name].verdict == "refuted"
    lower = {c.claim: c.verdict for c in probe_claims(QWEN25_1_5B, figures | {"probe/traced_chunked_peak_gb": 5.0})}
    assert lower[name] == "confirmed"


def test_a_trained_policy_needs_a_run_that_kept_its_optimizer(tmp_path):
    settings = experiment.Settings(backbone_dir="base", runs_dir=str(tmp_path))
    with pytest.raises(InputError, match="optimizer.pt"):
        experiment.TABLES["predictions"](settings)


def test_the_command_reads_the_probes_section_of_the_experiments_parameters(tmp_path):
    file = tmp_path / "probe.yaml"
    file.write_text("model: tiny\nprobe:\n  batch_config: {B: 4}\n  learning_rate: 2.0e-3\n")
    config = load_config(ProbeRunConfig, [file], ["batch_config.G=3"], section="probe")
    assert (config.batch_config.B, config.batch_config.G, config.learning_rate) == (4, 3, 2e-3)
    with pytest.raises(InputError, match="model"):
        load_config(ProbeRunConfig, [file])
