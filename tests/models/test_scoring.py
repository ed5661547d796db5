"""Scores and states of given completions against the plain way, forward and backward."""

import pytest
import torch
from conftest import VOCAB, float64_throughout, make_backbone, make_prompts, tiny_config, tiny_gpt2
from transformers import MistralConfig

from grade.models.batch import PromptBatch
from grade.models.scoring import completion_logps, predicting_hidden


def completions(batch=3, new=4):
    ids = torch.randint(3, VOCAB, (batch, new), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, 2:] = 0
    return ids, mask


def dense(backbone, prompts, ids):
    """log softmax at the positions before each token, from one pass over the whole sequence."""
    every = torch.cat([prompts.ids, ids], 1)
    mask = torch.cat([prompts.mask, torch.ones_like(ids)], 1)
    logits = backbone.head(backbone.hidden(backbone.embed(every), mask))
    return logits[:, prompts.ids.shape[1] - 1 : -1]


def test_scores_are_those_of_the_distribution_that_predicts_the_token():
    backbone, prompts, (ids, mask) = make_backbone(), make_prompts(), completions()
    logp = dense(backbone, prompts, ids).log_softmax(-1)
    got, want = completion_logps(backbone, prompts, ids, mask), logp.gather(2, ids.unsqueeze(2)).squeeze(2) * mask
    torch.testing.assert_close(got, want)
    parameters = backbone.trainable_parameters()
    torch.testing.assert_close(*(torch.autograd.grad(x.sum(), parameters, retain_graph=True) for x in (got, want)))
    with pytest.raises(ValueError, match="completions"):
        completion_logps(backbone, prompts, ids[:2], mask[:2])


def mistral():
    """Of layers that keep the keys and values of four positions."""
    return MistralConfig(**tiny_config().to_dict() | dict(model_type="mistral", sliding_window=4))


SHARED = [(tiny_config, 4), (tiny_config, 1), (tiny_config, 40), (mistral, 6), (tiny_gpt2, 4)]


@pytest.mark.parametrize(("make", "new"), SHARED, ids=lambda value: getattr(value, "__name__", None))
def test_a_prompt_with_several_completions_is_read_once(make, new, monkeypatch):
    """With the states and the gradient of a pass for each, where that pays; also of rows out of their order."""
    with float64_throughout():
        backbone = make_backbone(make(), **dict(target_modules=["c_attn"]) if make is tiny_gpt2 else {})
    read, outputs = [], type(backbone).outputs

    def counted(self, embeds, *args, **options):
        read.append(embeds.shape[:2].numel())
        return outputs(self, embeds, *args, **options)

    monkeypatch.setattr(type(backbone), "outputs", counted)
    prompts = make_prompts(3).repeat(2)[[5, 0, 2, 1, 3]]
    ids = torch.randint(3, VOCAB, (5, new), generator=torch.Generator().manual_seed(5))
    weights = torch.randn(5, new, backbone.hidden_size, generator=torch.Generator().manual_seed(6)).double()
    found = []
    for rows, recomputed in ((prompts, False), (PromptBatch(prompts.ids, prompts.mask), False), (prompts, True)):
        with float64_throughout():
            with backbone.checkpointed_layers(recomputed):
                hidden = predicting_hidden(backbone.view(), rows, ids)
            gradient = torch.autograd.grad((hidden * weights).sum(), backbone.trainable_parameters())
        found.append([hidden.detach(), *gradient])
    for others in found[1:]:
        torch.testing.assert_close(found[0], others, rtol=1e-10, atol=1e-10)
    apart = [5 * (5 + new - 1)]
    assert read == ([3 * 5, 5 * (new - 1)] if 1 < new < 40 else apart) + 2 * apart
