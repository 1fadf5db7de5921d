"""P3O on the rollouts of GRPOTrainer is fastp3o's own update, in one process and in two."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fastp3o.integrations.own_trainer import (
    assert_own_update,
    left_by_two,
    recorded,
    split_minibatches,
    two_processes,
)

pytest.importorskip("trl", reason="the extra `integrations` is not installed")
from fastp3o.integrations import padded_pairs
from fastp3o.integrations.trl import P3OConfig, P3OTrainer, p3o_trainer
from fastp3o.integrations.trl.p3o_trainer import shuffled_groups
from tests.fastp3o.integrations import trl_runs
from tests.fastp3o.integrations.trl_runs import arguments, p3o


@pytest.fixture
def record(monkeypatch):
    """Records a module's microbatches; after the test the module is as it was."""

    def record(module):
        monkeypatch.setattr(module, "padded_p3o_loss", module.padded_p3o_loss)
        return recorded(module)

    return record


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        pytest.param({}, {}, id="on-policy"),
        pytest.param({"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}, {}, id="iterations"),
        pytest.param(
            {"steps_per_generation": 2, "clipping": "separate", "max_steps": 4},
            {"clipping": "separate"},
            id="two-minibatches",
        ),
        pytest.param({"num_generations": 4, "beta": 0.0, "num_iterations": 2}, {"kl_coef": 0.0}, id="four-responses"),
    ],
)
def test_the_update_is_fastp3os_own(tmp_path, tiny_model, record, options, settings):
    microbatches = record(p3o_trainer)
    trainer = p3o(str(tmp_path), tiny_model, **options)
    iterations, generation = trainer.num_iterations, trainer.args.steps_per_generation
    rounds = [
        split_minibatches(microbatches[first : first + generation], trainer.args.gradient_accumulation_steps)
        for first in range(0, len(microbatches), generation * iterations)
    ]
    assert_own_update(trainer.model.state_dict(), tiny_model, rounds, iterations, **settings)


def test_two_processes_train_one_model_and_it_is_fastp3os_own(tmp_path, tiny_model):
    two_processes(trl_runs.__file__, tmp_path, tiny_model)
    weights, microbatches = left_by_two(tmp_path, "p3o")
    rounds = [split_minibatches(microbatches[first : first + 2], 2) for first in (0, 4)]
    assert_own_update(weights, tiny_model, rounds, 2)


@pytest.mark.parametrize("bf16", [False, True])
def test_one_model_goes_through_several_trainers(tmp_path, tiny_model, bf16):
    args = P3OConfig(**(arguments(str(tmp_path)) | {"max_completion_length": 6, "max_steps": 1, "bf16": bf16}))
    given = trl_runs.parts(tiny_model)
    head = given["model"].get_output_embeddings().weight
    for _ in range(2):
        before = head.detach().clone()
        P3OTrainer(reward_funcs=trl_runs.varied, args=args, **given).train()
        assert not torch.equal(head, before)


def test_bf16_trains_in_bf16(tmp_path, tiny_model, monkeypatch):
    seen = []

    def looking(*arguments, **options):
        seen.append(torch.is_autocast_enabled("cpu"))
        return linear_p3o_loss(*arguments, **options)

    linear_p3o_loss = padded_pairs.linear_p3o_loss
    monkeypatch.setattr(padded_pairs, "linear_p3o_loss", looking)
    p3o(str(tmp_path), tiny_model, bf16=True, max_steps=1)
    assert seen == [True]


def test_adapters_train_and_are_saved(tmp_path, tiny_model):
    peft = pytest.importorskip("peft")

    class Adapted(P3OTrainer):
        def __init__(self, **options):
            targets = peft.LoraConfig(r=2, target_modules=["q_proj"])
            super().__init__(peft_config=targets, **(options | {"optimizers": (None, None)}))

    options = {"num_iterations": 2, "save_strategy": "steps", "save_steps": 2, "gradient_checkpointing": True}
    trainer = p3o(str(tmp_path), tiny_model, Adapted, **options)
    assert all(weight.any() for name, weight in trainer.model.named_parameters() if "lora_B" in name)
    saved = tmp_path / "checkpoint-2"
    assert "2310.00212" in (saved / "README.md").read_text() + (tmp_path / "README.md").read_text()
    peft.AutoPeftModelForCausalLM.from_pretrained(saved)


def test_evaluation_takes_its_own_number_of_responses(tmp_path, tiny_model):
    trainer = p3o(str(tmp_path), tiny_model, num_generations_eval=4, max_steps=1)
    metrics = trainer.evaluate(trainer.train_dataset)
    assert metrics["eval_p3o/pairs"] == 1
    assert metrics["eval_p3o/ratio_mean"] == 1


def test_masked_completions_have_no_gradient(tmp_path, tiny_model, record):
    """The random model hardly ever ends a response within two tokens."""
    microbatches = record(p3o_trainer)
    options = {"mask_truncated_completions": True, "max_completion_length": 2, "max_steps": 1}
    trainer = p3o(str(tmp_path), tiny_model, **options)
    assert not any(response for group in microbatches[0] for response in group.responses)
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
        ({"cast_lm_head_to_fp32": True}, "cast_lm_head_to_fp32 belongs to GRPO"),
        ({"top_entropy_quantile": 0.5}, "top_entropy_quantile belongs"),
        ({"vllm_importance_sampling_correction": True}, "set it to False"),
        ({"clipping": "token"}, "averages over tokens"),
        ({"per_device_train_batch_size": 3, "steps_per_generation": 2}, "must hold all 2 responses"),
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        P3OConfig(**(arguments(str(tmp_path)) | options))


def test_grpos_configuration_is_refused(tmp_path, tiny_model):
    from trl import GRPOConfig

    args = GRPOConfig(**(arguments(str(tmp_path)) | {"num_generations": 2}))
    with pytest.raises(ValueError, match="got a GRPOConfig"):
        P3OTrainer(reward_funcs=trl_runs.varied, args=args, **trl_runs.parts(tiny_model))


def test_a_completion_without_a_reward_is_an_error(tmp_path, tiny_model):
    def some(completions, **_):
        return [None, *[1.0] * (len(completions) - 1)]

    with pytest.raises(ValueError, match="1 of 4 completions have no reward"):
        p3o(str(tmp_path), tiny_model, reward=some, max_steps=1)


def test_an_adapter_on_the_head_is_refused(tmp_path, tiny_model):
    peft = pytest.importorskip("peft")

    class Adapted(P3OTrainer):
        def __init__(self, **options):
            targets = peft.LoraConfig(r=2, target_modules=["lm_head"])
            super().__init__(peft_config=targets, **(options | {"optimizers": (None, None)}))

    with pytest.raises(ValueError, match="lm_head"):  # TRL sees it first
        p3o(str(tmp_path), tiny_model, Adapted, max_steps=1)
