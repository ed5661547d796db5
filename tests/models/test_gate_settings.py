"""What the gate reads of a model without running it, and what it sets."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from grade.errors import InputError
from grade.models import gate
from grade.models.gate import (
    _one_line,
    check_loaded,
    check_supported,
    check_vocabulary,
    silence,
)


class Plain(nn.Module):
    """As much of a model as `check_supported` looks at."""

    def __init__(self, forward=lambda inputs_embeds, past_key_values: None, head=True, **config):
        super().__init__()
        self.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config), **config)
        self.base_model, self._head, self.inner = SimpleNamespace(forward=forward), head, nn.Identity()

    def get_output_embeddings(self):
        return nn.Linear(1, 1) if self._head else None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_encoder_decoder": True}, "a decoder-only causal language model, not an encoder-decoder"),
        ({"head": False}, "with an output head"),
        ({"forward": lambda input_ids, past_key_values: None}, "accepts inputs_embeds"),
        ({"forward": lambda inputs_embeds: None}, "with a key-value cache"),
        ({"hidden_size_per_layer_input": 4}, "without embeddings per layer"),
    ],
)
def test_models_are_refused_for_what_they_say(changes, message):
    check_supported(Plain())
    check_supported(Plain(is_encoder_decoder=False, hidden_size_per_layer_input=0))
    with pytest.raises(InputError, match=f"backbone: got 'Plain'; allowed: .*{message}"):
        check_supported(Plain(**changes))


@pytest.mark.parametrize(
    ("limits", "refused"),
    [
        (None, False), ((0.0, float("inf")), False), ((0, float("inf")), False), ((0.001, float("inf")), True),
        ((0.0, 0.1), True), ((0.001, 0.1), True), ((0.0, 1e30), True),
    ],
)  # fmt: skip
def test_time_steps_may_have_no_limit(limits, refused):
    model = Plain()
    model.inner.time_step_limit = limits
    with pytest.raises(InputError, match="time steps have no limit") if refused else contextlib.nullcontext():
        check_supported(model)


def embedded(rows):
    return SimpleNamespace(get_input_embeddings=lambda: nn.Embedding(rows, 1))


@pytest.mark.parametrize(
    ("eos", "wrong"), [((), None), ((0,), None), ((4,), None), ((0, 4), None), ((5,), 5), ((-1,), -1), ((2, 7), 7),
                       ((1.0,), 1.0), (("2",), "'2'")]
)  # fmt: skip
def test_ends_of_sequence_are_rows_of_the_table(eos, wrong):
    expected = contextlib.nullcontext()
    if wrong is not None:
        expected = pytest.raises(InputError, match=f"^eos_token_id: got {wrong}; allowed: .* 0 to 4$")
    with expected:
        check_vocabulary(embedded(5), None, eos)


@pytest.mark.parametrize(("tokens", "refused"), [(4, False), (5, False), (6, True)])
def test_a_tokenizer_has_no_more_tokens_than_the_table_rows(tokens, refused):
    expected = pytest.raises(InputError, match=f"got {tokens}; allowed: at most 5") if refused else None
    with expected or contextlib.nullcontext():
        check_vocabulary(embedded(5), range(tokens), ())
    check_vocabulary(embedded(5), object(), ())  # without a length


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({}, None),
        ({"missing_keys": [], "unexpected_keys": ()}, None),
        ({"missing_keys": {"b"}}, "these lack b$"),
        ({"missing_keys": {"b", "a"}}, "these lack a and 1 more$"),
        ({"missing_keys": {"b", "a", "c"}, "unexpected_keys": {"x"}}, "these lack a and 2 more$"),
        ({"unexpected_keys": ["y", "x"]}, "these hold, unknown to the model, x and 1 more$"),
        ({"missing_keys": ["h.attn.bias"], "unexpected_keys": ["x"]}, "hold, unknown to the model, x$"),
    ],
)
def test_the_first_tensor_that_is_odd_is_named_and_the_others_counted(info, message):
    with pytest.raises(InputError, match=message) if message else contextlib.nullcontext():
        check_loaded("folder", info)


def test_silence_sets_rates_and_leaves_other_numbers():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    model[1].layerdrop, model[1].drop_last, model[1].dropped, model[1].rate = 0.3, True, 3, 0.7
    model.dtype, chosen = torch.float32, []
    model.set_experts_implementation = chosen.append
    model.train()
    silence(model)
    assert (model[0].p, model[1].layerdrop, model[1].drop_last, model[1].dropped, model[1].rate) == (
        0.5,
        0.0,
        True,
        3,
        0.7,
    )
    assert not any(m.training for m in model.modules()) and not any(p.requires_grad for p in model.parameters())
    assert chosen == []
    model.dtype = torch.float64
    silence(model)
    assert chosen == ["eager"]
    del model.set_experts_implementation
    silence(model)


def test_errors_of_a_model_are_one_line_and_those_of_memory_stay():
    for error in (InputError("a", 1, "b"), torch.OutOfMemoryError(), MemoryError()):
        with pytest.raises(type(error)) as caught, _one_line("Model"):
            raise error
        assert caught.value is error
    for text, shown in (
        ("", r"\(KeyError\)"),
        ("one\ntwo", r"\(ValueError: one\)"),
        ("\n \n  second line \nmore", r"\(ValueError: second line\)"),
        ("x" * 200, rf"\(ValueError: {'x' * 120}\)"),
    ):
        kind = ValueError if text else KeyError
        with pytest.raises(InputError, match=f"backbone: got 'Model'; .*cache {shown}$"), _one_line("Model"):
            raise kind(*([text] if text else []))


@pytest.mark.parametrize("fake", [True, False])
def test_weights_without_contents_are_not_run(fake, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    monkeypatch.setattr(gate, "_Probe", lambda _: pytest.fail("was run"))
    with FakeTensorMode() if fake else torch.device("meta"):
        weight = torch.empty(2, 2)
    gate.check_probe(SimpleNamespace(embedding_weight=weight))
