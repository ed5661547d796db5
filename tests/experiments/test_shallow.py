"""Rewards through the first layers of a base."""

import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_gpt2

from grade.errors import InputError
from grade.experiments.shallow import ShallowReward, first_layers
from grade.training.toy import toy_reviews, toy_task


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
