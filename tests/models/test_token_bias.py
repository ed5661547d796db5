"""A policy with a token bias: its logits, what shares it, what is saved of it."""

import pytest
import torch
from conftest import VOCAB, generator, make_backbone, make_prompts, tiny_config, tiny_gpt2
from transformers import AutoModelForCausalLM

from grade.errors import InputError
from grade.models.adapter import BASE_FILE
from grade.models.backbone import Backbone
from grade.models.sampling import generate
from grade.models.scoring import completion_logps, sequence_kl
from grade.models.token_bias import BIAS_FILE


def some_bias(seed=3, scale=1.0):
    return scale * torch.randn(VOCAB, dtype=torch.float64, generator=generator(seed))


def logits(policy, prompts=None):
    prompts = make_prompts() if prompts is None else prompts
    with torch.no_grad():
        return policy.head(policy.hidden(policy.embed(prompts.ids), prompts.mask))[prompts.mask.bool()]


def bare(config=None):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or tiny_config(), dtype=torch.float64)


def test_it_is_added_to_the_policys_logits_and_not_to_the_references():
    policy, bias = make_backbone(), some_bias()
    before = logits(policy)
    with policy.reference():
        reference = logits(policy)
    policy.set_token_bias(bias)
    torch.testing.assert_close(logits(policy), before + bias)
    with policy.reference():
        assert torch.equal(logits(policy), reference)
        with policy.merged():
            assert torch.equal(logits(policy), reference)
    with policy.merged():
        torch.testing.assert_close(logits(policy), before + bias)
    policy.set_token_bias(None)
    assert torch.equal(logits(policy), before)


def test_kl_to_the_reference_is_that_of_the_bias():
    policy = make_backbone(perturb=False)
    completions = torch.randint(3, VOCAB, (3, 4)), torch.ones(3, 4, dtype=torch.long)
    policy.set_token_bias(torch.zeros(VOCAB))
    assert sequence_kl(policy, make_prompts(), *completions).abs().max() < 1e-14
    policy.set_token_bias(some_bias())
    got, logp = sequence_kl(policy, make_prompts(), *completions), []
    prompts = make_prompts()
    inputs = torch.cat([prompts.ids, completions[0][:, :-1]], 1)
    plain = policy.ref_head(policy.hidden(policy.embed(inputs), prompts.mask_with(3)))[:, 4:]
    logp, ref_logp = (plain + some_bias()).log_softmax(-1), plain.log_softmax(-1)
    torch.testing.assert_close(got, (logp.exp() * (logp - ref_logp)).sum(-1).detach())


def test_samples_have_the_frequencies_of_the_biased_softmax():
    policy, n = make_backbone(), 4000
    policy.set_token_bias(some_bias(scale=2.0))
    prompts = make_prompts(1).repeat(n)
    ids, _ = generate(policy, prompts, 1, generator())
    p = (logits(policy, make_prompts(1))[-1]).softmax(-1)
    seen = torch.bincount(ids.flatten(), minlength=VOCAB) / n
    assert ((seen - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-9).all()


def test_views_and_the_backbone_they_are_of_share_it():
    policy = make_backbone()
    view = policy.view(temperature=0.5)
    view.set_token_bias(some_bias(), trainable=True)
    assert policy.token_bias is view.token_bias and policy.trainable_parameters()[-1] is policy.token_bias
    with torch.no_grad():
        policy.token_bias.mul_(2)
    torch.testing.assert_close(logits(view), (logits(policy)) / 0.5)
    with policy.reference():
        assert view.head.token_bias is None
    parameter = policy.token_bias
    policy.set_token_bias(some_bias(4))
    assert view.token_bias is parameter and parameter.requires_grad and torch.equal(parameter, some_bias(4))
    policy.set_token_bias(some_bias(5), trainable=False)
    assert len(policy.trainable_parameters()) == len(make_backbone().trainable_parameters())


def test_beside_an_adapter_it_is_saved_loaded_and_restored(tmp_path):
    policy, prompts = make_backbone(), make_prompts()
    policy.set_token_bias(some_bias())
    policy.save_adapter(tmp_path)
    again = Backbone(bare(), adapter=tmp_path)
    assert torch.equal(again.token_bias, policy.token_bias) and not again.token_bias.requires_grad
    assert torch.equal(logits(again), logits(policy))
    ids, mask = torch.randint(3, VOCAB, (3, 4)), torch.ones(3, 4, dtype=torch.long)
    assert torch.equal(completion_logps(again, prompts, ids, mask), completion_logps(policy, prompts, ids, mask))
    parameter = again.token_bias
    again.set_token_bias(some_bias(7))
    again.restore(tmp_path)
    assert again.token_bias is parameter and torch.equal(parameter, policy.token_bias)
    policy.set_token_bias(None)
    policy.save_adapter(tmp_path)
    assert Backbone(bare(), adapter=tmp_path).token_bias is None
    with pytest.raises(InputError, match=f"one with {BIAS_FILE}, as the policy is"):
        again.restore(tmp_path)


def test_without_an_adapter_it_is_a_policy_of_its_own(tmp_path):
    policy = Backbone(bare())
    policy.set_token_bias(some_bias())
    policy.save_adapter(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {BIAS_FILE, BASE_FILE}
    again = Backbone(bare(), adapter=tmp_path)
    assert again.peft is None and torch.equal(logits(again), logits(policy))
    one, two = (generate(p, make_prompts(), 5, generator())[0] for p in (policy, again))
    assert torch.equal(one, two)
    with pytest.raises(InputError, match="with other weights"):
        Backbone(bare(tiny_gpt2()), adapter=tmp_path)
