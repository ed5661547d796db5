"""The noise with which folding is checked: as small against the weights as an adapter is."""

from conftest import make_backbone

from grade.models import folding


def test_the_checks_adapter_is_a_tenth_of_the_weights(monkeypatch):
    # Each entry of scale B A is a sum of r products of two numbers, of deviation 0.1 w and 1 / sqrt(r).
    backbone, seen = make_backbone(), []

    def note(model, made=None):
        for _, layer in folding.lora_layers(model):
            delta = layer.get_delta_weight("default").detach()
            seen.append(float(delta.norm() / layer.get_base_layer().weight.norm()))
        return folded(model, made)

    folded = folding.folded
    monkeypatch.setattr(folding, "folded", note)
    folding.refuse_unfoldable(backbone.peft)
    assert len(seen) == 8 and 0.05 < min(seen) <= max(seen) < 0.2  # 0.1, but for the draw
