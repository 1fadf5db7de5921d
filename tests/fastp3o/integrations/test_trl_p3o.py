"""P3O on the rollouts of GRPOTrainer is fastp3o's own update."""

from itertools import chain

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fastp3o.integrations.own_trainer import assert_own_update, recorded

pytest.importorskip("trl", reason="the extra `integrations` is not installed")
from fastp3o.integrations.trl import P3OConfig, p3o_trainer
from fastp3o.integrations.trl.p3o_trainer import shuffled_groups
from tests.fastp3o.integrations.trl_runs import arguments, p3o


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        pytest.param({"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}, {}, id="iterations"),
        pytest.param(
            {"steps_per_generation": 2, "clipping": "separate", "max_steps": 4},
            {"clipping": "separate"},
            id="two-minibatches",
        ),
        pytest.param({"num_generations": 4, "beta": 0.0, "num_iterations": 2}, {"kl_coef": 0.0}, id="four-responses"),
    ],
)
def test_the_update_is_fastp3os_own(tmp_path, tiny_model, monkeypatch, options, settings):
    monkeypatch.setattr(p3o_trainer, "padded_p3o_loss", p3o_trainer.padded_p3o_loss)  # restored after the test
    microbatches = recorded(p3o_trainer)
    trainer = p3o(str(tmp_path), tiny_model, **options)
    iterations, generation = trainer.num_iterations, trainer.args.steps_per_generation
    accumulation = trainer.args.gradient_accumulation_steps
    steps = [
        [*chain.from_iterable(microbatches[first : first + accumulation])]
        for first in range(0, len(microbatches), accumulation)
    ]
    # Each generation's steps come once an iteration.
    generation //= accumulation
    rounds = [steps[first : first + generation] for first in range(0, len(steps), generation * iterations)]
    assert_own_update(trainer.model.state_dict(), tiny_model, rounds, iterations, **settings)


def test_masked_completions_have_no_gradient(tmp_path, tiny_model):
    """The random model hardly ever ends a response within two tokens."""
    options = {"mask_truncated_completions": True, "max_completion_length": 2, "max_steps": 1}
    trainer = p3o(str(tmp_path), tiny_model, **options)
    start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
    assert all(torch.equal(value, start[name]) for name, value in trainer.model.state_dict().items())


def test_siblings_stay_together():
    rows = torch.arange(12)
    shuffled = shuffled_groups({"rows": rows, "list": rows.tolist(), "number": torch.tensor(3), "none": None}, 3)
    assert shuffled["rows"].tolist() == shuffled["list"]
    firsts = shuffled["list"][::3]
    assert sorted(firsts) == [0, 3, 6, 9]
    assert shuffled["list"] == [first + sibling for first in firsts for sibling in range(3)]
    assert shuffled["number"] == 3
    assert shuffled["none"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_rewards": "group"}, "same difference of rewards"),
        ({"loss_type": "dr_grpo"}, "loss_type belongs to GRPO"),
        ({"vllm_importance_sampling_correction": True}, "set it to False"),
        ({"clipping": "token"}, "averages over tokens"),
        ({"per_device_train_batch_size": 3, "steps_per_generation": 2}, "must hold all 2 responses"),
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        P3OConfig(**(arguments(str(tmp_path)) | options))


def test_a_completion_without_a_reward_is_an_error(tmp_path, tiny_model):
    def some(completions, **_):
        return [None, *[1.0] * (len(completions) - 1)]

    with pytest.raises(ValueError, match="1 of 4 completions have no reward"):
        p3o(str(tmp_path), tiny_model, reward=some, max_steps=1)
