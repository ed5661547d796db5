"""On a CUDA device: every method trains, and what torch's kernels lack there is made up for. Skipped without one."""

import pytest
import torch
from training.runs import settings, toy_project

from grade.gradients.methods import METHODS
from grade.memory.settings import StepConfig
from grade.memory.step import build, make_step
from grade.models.head import weighted_embedding
from grade.training.run import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains(method, dtype, tmp_path):
    common = toy_project(tmp_path) | {"use_cpu": False, "dtype": dtype, "save_strategy": "no", "max_steps": 2}
    result = train(settings(method, common, tmp_path / "run"), print)
    assert result.step == 2 and result.after.kl.mean() > 0


@pytest.mark.parametrize("method", ["gumbel", "rloo"])
def test_gradients_of_padded_texts_are_finite_at_every_length(method):
    for prompt in (31, 32, 33):  # with the completion 64 tokens and around, where cuDNN's attention gives NaN
        values = dict(model="tiny", method=method, reward="trunk", batch_size=8, gradient_checkpointing=True)
        config = StepConfig(**values, prompt_tokens=prompt, max_new_tokens=32)
        step = make_step(config, *build(config, device="cuda"))
        step.run()
        assert all(p.isfinite().all() for p in step.backbone.trainable_parameters())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("engine", ["replay", "checkpointed", "unrolled"])
def test_every_engine_takes_a_step(engine, dtype):
    values = dict(model="tiny", method="ste", batch_size=2, prompt_tokens=8, max_new_tokens=4)
    config = StepConfig(**values, engine=engine, dtype=dtype)
    step = make_step(config, *build(config, device="cuda"))
    step.run()
    assert all(p.isfinite().all() for p in step.backbone.trainable_parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gradient_of_a_weighted_embedding_is_that_of_float64(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    support = torch.randint(500, (40, 16), generator=generator, device="cuda")
    shapes = (500, 64), (40, 16), (40, 64)
    table, weights, grad = (torch.randn(shape, generator=generator, device="cuda").to(dtype) for shape in shapes)
    exact = (table.double()[support] @ grad.double().unsqueeze(-1)).squeeze(-1)
    embedding = weighted_embedding(table, support, weights.requires_grad_())
    (found,) = torch.autograd.grad(embedding, weights, grad)
    assert (found.double() - exact).norm() / exact.norm() < torch.finfo(dtype).eps
