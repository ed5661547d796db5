"""Values that depend on the state: found in texts that have them, and followed by the policy's logits."""

from dataclasses import replace

import torch
from conftest import tiny_config
from transformers import AutoModelForCausalLM

from grade.experiments.in_context import InContext
from grade.gradients.tilt import Agreement, fit_values, predictions
from grade.models.batch import Completions, PromptBatch
from grade.models.scoring import predicting_hidden


def test_values_of_token_and_state_are_found_and_added_to_the_logits():
    torch.manual_seed(0)
    policy = InContext(AutoModelForCausalLM.from_config(tiny_config()).double())
    vocab, width = policy.vocab_size, policy.hidden_size
    given = torch.randint(0, vocab, (1200, 9))
    ones = torch.ones_like(given)
    text = Completions(PromptBatch(given[:, :3], ones[:, :3]), given[:, 3:], ones[:, 3:])
    policy.values = torch.zeros(vocab).double(), torch.randn(width, width).double()
    text = replace(text, rewards=policy.predictions(text))
    seen, others = text[:800], text[800:]

    policy.fit(seen)
    tokens, *_ = fit_values(seen.ids, seen.mask, seen.rewards, vocab, seen.prompts)
    r2 = [Agreement.of(found, others.rewards, 400).r2
          for found in (policy.predictions(others), predictions(tokens, others.ids, others.mask))]  # fmt: skip
    assert r2[0] > 0.8 and r2[1] < 0.5, r2

    policy.set_length(0.5)
    tokens, moved = policy.values
    hidden = predicting_hidden(policy, others.prompts, others.ids)[0, 0].detach()
    added = policy.head(hidden) - policy.ref_head(hidden)
    wanted = [0.5 * (tokens[v] + hidden @ moved @ policy.embedding_weight[v]) for v in range(vocab)]
    torch.testing.assert_close(added, torch.stack(wanted).detach(), check_dtype=False)
    with policy.reference():
        assert torch.equal(policy.head(hidden), policy.ref_head(hidden))
