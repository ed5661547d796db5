"""The parts of a traced step by hand arithmetic: what runs how often, on what, and which memory was there before."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import grade.gradients.engines as engines
import grade.memory.step as steps
from grade.gradients.objective import Objective
from grade.gradients.unrolled import stepwise, unrolled
from grade.memory.live import LiveTracker
from grade.memory.sharded import alone_among
from grade.memory.step import Step, StepConfig, TracedConfig, generator_on, phase


class Backbone(nn.Module):
    """Four frozen numbers, two trained ones and a buffer, in float64; writes down the contexts that it was in."""

    def __init__(self, adapter=True):
        super().__init__()
        self.frozen = nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False)
        self.trained = nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.float64))
        self.register_buffer("table", torch.zeros(3))
        self.peft, self.vocab_size, self.device = object() if adapter else None, 7, torch.device("cpu")
        self.within, self.log = {}, []

    def trainable_parameters(self):
        return [self.trained]

    @contextlib.contextmanager
    def watched_by(self, tracker):
        self.within["tracker"] = tracker
        yield
        del self.within["tracker"]

    @contextlib.contextmanager
    def checkpointed_layers(self, enabled):
        self.within["layers"] = enabled
        yield
        del self.within["layers"]

    def note(self, **values):
        self.log.append(self.within | values | {"autocast": torch.is_autocast_enabled("cpu")})


class Own(TracedConfig):
    """A step whose microbatch is counted."""

    def microbatch(self, backbone, others):
        return lambda tracker: others.append(("microbatch", tracker))


def plain_step(program, *shapes, rate=1.0):
    """A step of gradient descent on zeros, a group for each shape."""
    parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=rate)
    return Step(Backbone(), optimizer, lambda *args: program(parameters, *args), [], []), parameters


def test_a_step_starts_and_ends_without_gradients():
    seen = []

    def program(parameters, tracker, apply):
        seen.append(([p.grad for p in parameters], tracker))
        for p in parameters:
            p.grad = torch.ones_like(p)
        apply()

    step, parameters = plain_step(program, 2, 3)
    parameters[0].grad = torch.ones(2, dtype=torch.float64)  # left by somebody
    step.run()
    step.run()
    assert seen == [([None, None], None)] * 2
    assert [p.grad for p in parameters] == [None, None]


def test_groups_are_clipped_to_norm_one_each_and_every_update_is_taken():
    def program(parameters, tracker, apply):
        for _ in range(2):
            parameters[0].grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
            parameters[1].grad = torch.tensor([0.5], dtype=torch.float64)
            apply()

    step, (long, short) = plain_step(program, 2, 1)
    step.run()
    # torch divides by the norm and 1e-6 more
    torch.testing.assert_close(long.data, -2 * torch.tensor([0.6, 0.8], dtype=torch.float64), rtol=1e-6, atol=0)
    assert short.tolist() == [-1.0]


def test_an_update_is_the_phase_optimizer_and_gradients_are_named_after_it():
    def program(parameters, tracker, apply):
        for p in parameters:
            p.grad = torch.full_like(p, 0.1)
        apply()

    step, _ = plain_step(program, 2)
    tracker = LiveTracker(round_to=1)
    with tracker:
        step.run(tracker)
    assert [(r.op, r.phase, r.tag) for r in tracker.records][:1] == [("full_like", "forward", "gradients")]
    assert {r.phase for r in tracker.records[1:]} == {"optimizer"} and len(tracker.records) > 1
    assert {r.tag for r in tracker.records[1:]} == {None}


def test_gradients_travel_before_they_are_clipped():
    def program(parameters, tracker, apply):
        parameters[0].grad = torch.full_like(parameters[0], 0.1)
        apply()

    step, _ = plain_step(program, 5, 1)
    with alone_among(4), LiveTracker() as tracker:
        step.run(tracker)
    assert tracker.received == 2 * 3 * 40 // 4


@pytest.mark.parametrize("adapter", [True, False])
def test_what_is_there_before_a_step(adapter):
    backbone, other, copy = Backbone(adapter), nn.BatchNorm1d(2), torch.zeros(6)
    optimizer = torch.optim.AdamW([backbone.trained])
    backbone.trained.grad = torch.ones(2, dtype=torch.float64)
    optimizer.step()
    found = Step(backbone, optimizer, None, [other], [copy]).existing()
    state = optimizer.state[backbone.trained]
    expected = {
        "weights": [backbone.frozen, *([] if adapter else [backbone.trained]), backbone.table, other.weight, other.bias,
                    other.running_mean, other.running_var, other.num_batches_tracked, copy],
        "adapter": [backbone.trained] * adapter,
        "optimizer": [state["step"], state["exp_avg"], state["exp_avg_sq"]],
    }  # fmt: skip
    assert {name: [id(t) for t in tensors] for name, tensors in found.items()} == {
        name: [id(t) for t in tensors] for name, tensors in expected.items()
    }


@pytest.mark.parametrize("microbatches", [1, 3])
def test_microbatches_come_before_the_one_update(microbatches):
    calls = []
    program, more = Own(gradient_accumulation_steps=microbatches).program(None, calls)
    assert more == [] and calls == []
    program("tracker", lambda: calls.append("update"))
    assert calls == [("microbatch", "tracker")] * microbatches + ["update"]


def test_a_step_is_told_what_its_microbatch_is():
    with pytest.raises(TypeError, match="abstract.*microbatch"):
        TracedConfig()
    assert Own().batch_unit == 1


@pytest.mark.parametrize(("adapter", "copies", "sizes"), [
    ("lora", 1, []), ("lora", 2, [4]), ("lora", 3, [4, 4]), ("full", 1, []), ("full", 2, [4, 2]),
    ("full", 3, [4, 2, 4, 2]),
])  # fmt: skip
def test_copies_are_of_what_is_not_trained_or_of_everything(adapter, copies, sizes):
    step = Own(adapter=adapter, base_copies=copies).make_step(Backbone(), [])
    assert [copy.numel() for copy in step.copies] == sizes
    assert all(copy.dtype == torch.float64 for copy in step.copies)


def test_a_step_is_like_the_second_of_a_run():
    """Moments of AdamW are there, of a first step with gradients of 0.

    With gradients of 1 the second step has ``m = 0.1, v = 0.001``, corrected by ``1 - 0.9^2`` and ``1 - 0.999^2``.
    """
    backbone, head = Backbone(), nn.Linear(1, 1, bias=False, dtype=torch.float64)
    config = Own()
    config.__dict__["program"] = lambda *_: ("the program", [head])  # validated: a frozen config has no other way
    step = config.make_step(backbone, ["other"])
    assert step.backbone is backbone and step.program == "the program" and step.others == ["other", head]
    assert [group["params"] for group in step.optimizer.param_groups] == [[backbone.trained], [head.weight]]
    for parameter in (backbone.trained, head.weight):
        assert parameter.grad is None
        state = step.optimizer.state[parameter]
        assert (state["step"], state["exp_avg"].sum(), state["exp_avg_sq"].sum()) == (1, 0, 0)
    before = backbone.trained.detach().clone()
    assert before.tolist() == [1.0, 2.0]
    backbone.trained.grad = torch.ones(2, dtype=torch.float64)
    step.optimizer.step()
    size = 1e-4 * (0.1 / (1 - 0.9**2)) / (0.001 / (1 - 0.999**2)) ** 0.5
    torch.testing.assert_close(before - backbone.trained.detach(), torch.full((2,), size).double(), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("count", "rows"), [(None, 3), (1, 1), (2, 2), (5, 5)])
def test_prompts_are_random_tokens_the_first_of_them_padded(count, rows):
    config, backbone = Own(batch_size=3, prompt_tokens=40), Backbone()
    prompts = config.prompts(backbone) if count is None else config.prompts(backbone, count)
    assert prompts.ids.shape == prompts.mask.shape == (rows, 40)
    assert set(prompts.ids.flatten().tolist()) == set(range(7))
    assert prompts.mask.sum() == rows * 40 - 1 and prompts.mask[0, 0] == 0
    again = torch.randint(7, (rows, 40), generator=torch.Generator().manual_seed(0))
    assert torch.equal(prompts.ids, again)


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_a_prompt_of_one_token_is_not_padded(tokens):
    mask = Own(prompt_tokens=tokens).prompts(Backbone()).mask
    assert mask.tolist() == [[1] if tokens == 1 else [0] + [1] * (tokens - 1)]


def test_casting_is_to_bfloat16_where_it_is_on():
    x = torch.ones(2, 2)
    with Own(autocast=True).casting(Backbone()):
        assert (x @ x).dtype == torch.bfloat16
    with Own().casting(Backbone()):
        assert (x @ x).dtype == torch.float32
    assert (x @ x).dtype == torch.float32


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({}, False), ({"gradient_checkpointing": True}, False), ({"engine": "unrolled"}, False),
        ({"engine": "unrolled", "gradient_checkpointing": True}, True), ({"engine": "checkpointed"}, False),
        ({"method": "gumbel_legacy", "gradient_checkpointing": True}, True), ({"autocast": True}, False),
    ],
    ids=str,
)  # fmt: skip
def test_a_relaxed_microbatch_is_an_equal_share(monkeypatch, microbatches, values, layers):
    backbone, reward, drawn = Backbone(), nn.Identity(), []

    def engine(policy, prompts, objective, relaxation, generator, scale):
        assert policy is backbone and (objective.reward_model, objective.beta) == (reward, 0.25)
        drawn.append((prompts, torch.rand(3, generator=generator).tolist()))
        backbone.note(scale=scale, relaxation=relaxation, rows=len(prompts.ids))

    monkeypatch.setattr(StepConfig, "make_engine", lambda self: engine)
    config = StepConfig(model="tiny", kl_coef=0.25, batch_size=2, gradient_accumulation_steps=microbatches, **values)
    run = config.microbatch(backbone, [reward])
    run("tracker")
    run(None)
    expected = dict(layers=layers, scale=1 / microbatches, relaxation=config.relaxation(), rows=2)
    autocast = config.autocast
    assert backbone.log == [expected | dict(tracker=tracker, autocast=autocast) for tracker in ("tracker", None)]
    assert drawn[0][0] is drawn[1][0] and drawn[0][1] == drawn[1][1]  # the same prompts and noise
    assert backbone.within == {}


class Learner:
    """Stands for a policy gradient: writes down what it is made of and what its step gets."""

    value_head = None

    def __init__(self, settings, backbone, *more):
        self.settings, self.backbone, self.more, self.kept = settings, backbone, more, nn.Identity()
        Learner.made = self

    def step(self, microbatches, objective, context):
        draws = [(prompts, torch.rand(2, generator=generator).tolist()) for prompts, generator in microbatches]
        assert all(prompts is draws[0][0] and noise == draws[0][1] for prompts, noise in draws)
        self.backbone.note(draws=len(draws), rows=len(draws[0][0].ids), objective=objective, context=context)


@pytest.mark.parametrize("head", [None, nn.Linear(1, 1)])
@pytest.mark.parametrize(
    ("values", "prompts"),
    [
        (dict(method="rloo", num_generations=2, batch_size=6, gradient_accumulation_steps=3), 3),
        (dict(method="ppo", batch_size=4, autocast=True), 4),
        (dict(method="grpo", num_generations=4, batch_size=4), 1),
    ],
    ids=str,
)
def test_a_policy_gradient_learns_from_its_microbatches(monkeypatch, values, prompts, head):
    monkeypatch.setattr(Learner, "value_head", head)
    monkeypatch.setattr(steps, "PolicyGradient", Learner)
    config, backbone, reward = StepConfig(model="tiny", kl_coef=0.25, **values), Backbone(), nn.Identity()
    run, more = config.program(backbone, [reward])
    assert more == ([] if head is None else [head])
    assert Learner.made.settings == config._settings and Learner.made.backbone is backbone and not Learner.made.more
    run("tracker", len)
    (found,) = backbone.log
    context = found.pop("context")
    assert (context.microbatches, context.apply, context.total) == (
        config.gradient_accumulation_steps,
        len,
        steps._total,
    )
    assert found == dict(
        tracker="tracker", draws=config.gradient_accumulation_steps, rows=prompts, objective=Objective(reward, 0.25),
        autocast=config.autocast,
    )  # fmt: skip
    assert backbone.within == {}


def test_distilled_learns_with_what_it_keeps(monkeypatch):
    import grade.memory.distilled_step as distilled

    monkeypatch.setattr(distilled, "TracedDistilled", Learner)
    config, backbone = StepConfig(model="tiny", method="distilled", num_generations=2, batch_size=6), Backbone()
    run, more = config.program(backbone, [nn.Identity()])
    assert more == [Learner.made.kept] and Learner.made.settings == config._settings
    assert [len(prompts.ids) for prompts in Learner.made.more] == [3]
    run(None, len)
    assert backbone.log[0]["rows"] == 3 and backbone.log[0]["context"].total is distilled.total


def test_a_relaxed_method_has_a_program_of_microbatches(monkeypatch):
    monkeypatch.setattr(StepConfig, "microbatch", lambda self, backbone, others: others.append)
    others = []
    run, more = StepConfig(model="tiny", gradient_accumulation_steps=2).program(None, others)
    run("tracker", lambda: others.append("update"))
    assert (others, more) == (["tracker", "tracker", "update"], [])


REPLAY = dict(hops=2, tolerance=0.0, gradient_checkpointing=False)


@pytest.mark.parametrize(
    ("values", "name", "keywords"),
    [
        ({"hops": 3}, "replay", REPLAY | dict(hops=3)),
        ({"gradient_checkpointing": True}, "replay", REPLAY | dict(gradient_checkpointing=True)),
        ({"engine": "checkpointed"}, "checkpointed", None),
        ({"engine": "unrolled"}, "unrolled", None),
        ({"engine": "unrolled", "gradient_checkpointing": True}, "unrolled", None),
        ({"method": "ste_legacy"}, "unrolled", None),
        ({"method": "ste_legacy", "engine": "replay", "hops": 0}, "replay", REPLAY | dict(hops=0)),
    ],
    ids=str,
)
def test_the_engine_is_the_methods_or_the_one_that_is_named(values, name, keywords):
    found = StepConfig(model="tiny", **values).make_engine()
    if keywords:
        assert (found.func, found.keywords) == (engines.replay, keywords)
    else:
        assert found is getattr(engines, name)


def test_explicit_freeing_changes_nothing_else_of_the_unrolled_engine():
    engine = StepConfig(model="tiny", method="ste_legacy", explicit_freeing=True).make_engine()
    (plain,) = unrolled.keywords.values()
    assert engine.func is stepwise and vars(engine.keywords["options"]) == vars(plain) | {"drop_lists": True}


def test_the_relaxation_has_the_settings_and_temperature_one():
    config = StepConfig(model="tiny", method="gumbel_legacy", support="top_k", gumbel_topk=9, max_new_tokens=11)
    found = config.relaxation()
    assert found.model_dump() == dict(
        estimator="gumbel", support="top_k", gumbel_topk=9, tau=1.0, rao_draws=8, max_new_tokens=11, min_new_tokens=0
    )


@pytest.mark.parametrize(
    ("model", "reward", "expected"), [(12, None, 12), (12, 9, 9), (9, 12, 9), (None, 12, 12), (None, None, None)]
)
def test_a_step_is_as_long_as_its_shortest_context(monkeypatch, model, reward, expected):
    monkeypatch.setattr(steps, "reward_context", lambda spec: reward)
    shape = SimpleNamespace() if model is None else SimpleNamespace(max_position_embeddings=model)
    assert StepConfig(model="tiny").longest(shape) == expected
    assert Own().longest(shape) == model


def test_stand_ins_for_moments_are_those_of_two_values_that_can_be_whitened():
    values = torch.tensor([1.0, -1.0], dtype=torch.float64)
    moments = torch.tensor([len(values), values.sum(), values.square().sum()], dtype=torch.float64)
    assert torch.equal(steps._total(torch.empty(3, device="meta")), moments)


def test_a_generator_is_the_same_each_time():
    first, second = (torch.rand(3, generator=generator_on(Backbone())) for _ in range(2))
    assert torch.equal(first, second) and generator_on(Backbone()).initial_seed() == 0


def test_a_phase_is_named_where_there_is_a_tracker():
    tracker = LiveTracker()
    with phase(tracker, "reward"):
        assert tracker.phase == "reward"
    with phase(None, "reward"):
        assert tracker.phase == "forward"
