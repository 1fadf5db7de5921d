"""No pass for nothing: tokens through layers by phase of an update, and what stands in for passes
that are not made.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from fastp3o.calls.endpoint import EndpointError
from fastp3o.errors import UserError
from fastp3o.evaluation.matched_kl import read_run
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import NoReference
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.packing.pack import Packing
from fastp3o.run.run import Run
from fastp3o.runtime.shares import Share
from fastp3o.training import build, loop
from fastp3o.training.logprob_gaps import NOISE_EVERY, NOISE_RESPONSES
from fastp3o.training.microbatches import make_microbatches, pack_minibatches, policy_logprobs
from tests.fastp3o.groups import groups_of_ids
from tests.fastp3o.models.model_families import random_model
from tests.fastp3o.rollouts.vllm.stand_in import StandIn, served_by
from tests.fastp3o.runs import assert_equal, assert_resumes, config, metrics, weights

ONE_STEP = {"inner_epochs": 1, "prompts_per_minibatch": 8, "responses_per_prompt": 4}
SEVERAL = {"inner_epochs": 2, "prompts_per_minibatch": 4, "responses_per_prompt": 4}
TEACHER = {"reward": ""}

# What an update's rows go through before and in its steps: (log-probs without gradients, passes
# with gradients).
CASES = {
    "p3o": (SEVERAL, (2, 2)),
    "p3o without a KL": (SEVERAL | {"kl_coef": 0.0}, (1, 2)),
    "p3o to the sampler": (SEVERAL | {"old_logprobs": "sampler"}, (1, 2)),
    "p3o in one step": (ONE_STEP, (1, 1)),
    "p3o to the sampler in one step": (ONE_STEP | {"old_logprobs": "sampler"}, (1, 1)),
    "p3o by tokens in one step": (ONE_STEP | {"clipping": "token"}, (1, 1)),
    "p3o with a cap": (ONE_STEP | {"sampler_ratio_cap": 2.0}, (1, 1)),
    "p3o with a target": (ONE_STEP | {"target_kl": 1.0}, (2, 1)),
    "p3o without a KL in one step": (ONE_STEP | {"kl_coef": 0.0}, (0, 1)),
    "p3o with a reference for its metric": (
        ONE_STEP | {"kl_coef": 0.0, "reference": "MODEL"},
        (1, 1),
    ),
    "p3o with LoRA": (ONE_STEP | {"lora_rank": 2}, (1, 1)),
    "p3o with LoRA, without a KL": (ONE_STEP | {"lora_rank": 2, "kl_coef": 0.0}, (0, 1)),
    "ppg": (ONE_STEP, (1, 1)),
    "grpo": (ONE_STEP, (1, 1)),
    "grpo with k3": (ONE_STEP | {"kl_estimator": "k3"}, (1, 1)),
    "grpo without a KL": (ONE_STEP | {"kl_coef": 0.0}, (0, 1)),
    "dapo": (ONE_STEP, (0, 1)),
    "gspo with a cap": (ONE_STEP | {"sampler_ratio_cap": 2.0}, (0, 1)),
    "rloo": (ONE_STEP, (1, 1)),
    "rloo with dropout": (ONE_STEP | {"lora_rank": 2, "lora_dropout": 0.1}, (2, 1)),
    "reinforce": (ONE_STEP, (2, 1)),  # the KL of all is in the baseline
    "reinforce with k2": (ONE_STEP | {"kl_estimator": "k2"}, (1, 1)),
    "rebel": (ONE_STEP, (0, 1)),
    "copg": (ONE_STEP, (1, 1)),
    "oapl": (ONE_STEP, (0, 1)),
    "ppo": (ONE_STEP, (3, 2)),  # log-probs and values before the step; the critic trains
    "ppo without a KL": (ONE_STEP | {"kl_coef": 0.0}, (1, 2)),
    "online_dpo": (ONE_STEP, (1, 1)),
    "online_simpo": (ONE_STEP, (0, 1)),
    "bpo": (ONE_STEP, (0, 1)),
    "nash_md": (ONE_STEP, (1, 1)),
    "distillation": (
        ONE_STEP | TEACHER,
        (2, 2),
    ),  # the exact KL reads the teacher's states in the step
    "distillation as sampled": (ONE_STEP | TEACHER | {"kl": "sampled"}, (1, 1)),
}


class Tokens:
    """Tokens through layers by phase, of one update after the other, in units of all tokens of the
    rows that train.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.phase, self.counts, self.updates = "", Counter[str](), list[dict[str, float]]()
        self.noise = list[float]()
        hidden_states, enter, report = PackedModel.hidden_states, Run.phase, loop.report_update

        def counted(model, ids, *arguments, **options):
            self.counts[self.phase] += ids.numel()
            return hidden_states(model, ids, *arguments, **options)

        def entered(run, phase):
            self.phase = phase
            return enter(run, phase)

        def reported(run, objective, update, *rest):
            whole = sum(one.row.tokens for one in update.microbatches)
            self.updates.append({phase: count / whole for phase, count in self.counts.items()})
            longest = max(
                len(g.prompt.ids) + len(r.ids) for g in update.batch.groups for r in g.responses
            )
            self.noise.append(NOISE_RESPONSES * longest / whole)
            self.counts.clear()
            report(run, objective, update, *rest)

        monkeypatch.setattr(PackedModel, "hidden_states", counted)
        monkeypatch.setattr(Run, "phase", entered)
        monkeypatch.setattr(loop, "report_update", reported)


@pytest.mark.parametrize("name", CASES)
def test_an_update_computes_each_token_as_often_as_its_loss_needs(
    workplace, tiny_model, monkeypatch, name
):
    changes, (before, in_steps) = CASES[name]
    changes = {key: tiny_model if value == "MODEL" else value for key, value in changes.items()}
    tokens = Tokens(monkeypatch)
    loop.train(config(tiny_model, "run", OBJECTIVES[name.split()[0]], updates=2, **changes))
    first, second = tokens.updates
    assert second.get("logprobs", 0) == before
    assert second["update"] == in_steps
    # The first update also looks at rounding, in a few responses.
    assert 0 < first["logprobs"] - before <= tokens.noise[0] + 1e-9
    assert first["update"] == in_steps


def test_rounding_is_measured_in_a_few_responses_of_each_tenth_update(
    workplace, tiny_model, monkeypatch
):
    tokens = Tokens(monkeypatch)
    loop.train(config(tiny_model, "run", updates=NOISE_EVERY + 2, **ONE_STEP))
    extra = [update["logprobs"] - 1 for update in tokens.updates]
    measured = ["ratio/noise" in line for line in metrics("run")]
    assert [step for step, more in enumerate(extra) if more] == [0, NOISE_EVERY]
    assert [step for step, has in enumerate(measured) if has] == [0, NOISE_EVERY]
    assert max(extra) <= max(tokens.noise) + 1e-9
    assert tokens.noise[0] < 0.5  # of 32 responses


@pytest.mark.parametrize(
    "changes", [{"kl_coef": 0.0}, {"kl_per_update": 0.3, "old_logprobs": "sampler"}], ids=str
)
def test_a_run_without_these_passes_goes_on_with_the_same_bits(workplace, tiny_model, changes):
    run = config(
        tiny_model,
        "run",
        updates=NOISE_EVERY + 2,
        save_every=NOISE_EVERY - 1,
        **ONE_STEP,
        **changes,
    )
    loop.train(run)
    assert_resumes(run)


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}], ids=str)
def test_without_a_kl_no_reference_is_loaded_unless_one_is_named(
    workplace, tiny_model, monkeypatch, changes
):
    loaded: list[str] = []
    load = build.load_frozen_policy
    monkeypatch.setattr(
        build, "load_frozen_policy", lambda *of: (loaded.append(of[-1]), load(*of))[1]
    )
    run = partial(
        config,
        tiny_model,
        kl_coef=0.0,
        updates=1,
        eval_prompts="prompts.jsonl",
        log_rollouts=1,
        **changes,
    )
    loop.train(run("plain", **ONE_STEP))
    assert loaded == []
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert all("reward" in line and "kl" not in line for line in metrics("plain", name))
    for group in map(dict, metrics("plain", "rollouts.jsonl")):
        assert group["kl"] is None
        assert all(response["log_ratio"] is None for response in group["responses"])
    with pytest.raises(
        UserError, match=r"eval.jsonl lacks kl, kl_std at step 0: .*if --reference names a model"
    ):
        read_run(Path("plain"))

    loop.train(run("named", reference=tiny_model, **ONE_STEP))
    assert loaded == [tiny_model]
    assert all(
        "kl" in line for name in ("metrics.jsonl", "eval.jsonl") for line in metrics("named", name)
    )
    assert read_run(Path("named"))


def known_and_noted(name: str, **changes) -> tuple[Callable, list[Microbatch], PackedModel]:
    """The first loss of an objective on two microbatches, whose old log-probs are known and not
    known.
    """
    generator = torch.Generator().manual_seed(1)

    def ids() -> list[int]:
        return torch.randint(
            3, 48, (int(torch.randint(1, 9, (), generator=generator)),), generator=generator
        ).tolist()

    rollouts = groups_of_ids(
        [ids() for _ in range(4)], [[ids() for _ in range(4)] for _ in range(4)]
    )
    settings = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r"}
    objective, policy = (
        OBJECTIVES[name](**settings, **changes).build(),
        PackedModel(random_model("llama")),
    )
    objective.add_to(policy)
    (rows,) = pack_minibatches(Share(), rollouts, 1, Packing(1000))
    rewards = torch.randn(4, 4, generator=generator)
    made = []
    for old in (partial(policy_logprobs, policy), None):
        minibatches = make_microbatches(
            Accelerator(cpu=True), old, NoReference(), [rows], rewards, None
        )
        ((one,),) = objective.prepare(policy, minibatches, lambda sums: sums)
        made.append(replace(one, sampler_token_logprobs=-torch.arange(len(one.row.labels)) / 10))
    return partial(objective.loss, first=True), made, policy


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("p3o", {}),
        ("p3o", {"clipping": "separate"}),
        ("p3o", {"clipping": "token"}),
        ("p3o", {"sampler_ratio_cap": 2.0}),
        ("grpo", {"sampler_ratio_cap": 2.0}),
        ("grpo", {"kl_estimator": "k3"}),
        ("rloo", {}),
        ("gspo", {}),
        ("sapo", {}),
        ("vespo", {}),
        ("rebel", {}),
        ("ppo", {"kl_coef": 0.0}),
        ("bpo", {}),
        ("distillation", {"kl": "sampled"}),
    ],
    ids=str,
)
def test_the_first_loss_leaves_the_bits_that_a_pass_of_its_own_would(name, changes):
    """And loss and gradients are the same. Importance weights of P3O alone round otherwise."""
    first_loss, (known, unknown), policy = known_and_noted(name, **changes)
    assert unknown.old_token_logprobs.isnan().all()
    losses, gradients = [], []
    for one in (known, unknown):
        policy.zero_grad()
        loss, found = first_loss(policy, one, 1.0)
        loss.backward()
        losses.append({"loss": loss.detach(), **found})
        gradients.append([p.grad for p in policy.parameters() if p.grad is not None])
    assert torch.equal(known.old_token_logprobs, unknown.old_token_logprobs)
    assert torch.equal(known.old_logprobs, unknown.old_logprobs)
    rtol, atol = (1e-5, 1e-6) if (name, *changes) == ("p3o", "sampler_ratio_cap") else (0, 0)
    torch.testing.assert_close(losses[1], losses[0], rtol=rtol, atol=atol)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=rtol, atol=atol)


def test_a_server_with_other_weights_ends_a_run_before_its_only_step(workplace, tiny_model):
    """The loss has the log-probs that the server's are compared with; state and model are those
    before the update.
    """
    run = partial(config, tiny_model, "run", updates=2, **ONE_STEP)
    says = r"update 2: .*the servers' log-probs of .* nats off .*--resume continues"
    off = StandIn(tiny_model, fault="off", from_completion=2 + 8 + 2 + 6)
    with off as server, pytest.raises(EndpointError, match=says):
        loop.train(run(**served_by(server)))
    assert [step["step"] for step in metrics("run")] == [1]
    assert Path("run/state/step-000001").is_dir()
    with StandIn(tiny_model) as server:
        loop.train(run(resume=True, **served_by(server)))
        loop.train(replace(run(**served_by(server)), output_dir="whole"))
    assert_equal(weights("whole"), weights("run"))
