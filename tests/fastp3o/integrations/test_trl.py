"""TRL's trainers: P3O on rollouts of GRPOTrainer is fastp3o's own update, and its own trainers on
`linear_logprobs` have the same weights and metrics as before.
"""

from itertools import chain

import pytest
import torch

pytest.importorskip("trl", reason="the extra `integrations` is not installed")
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from fastp3o.integrations.trl import (
    P3OTrainer,
    TRLP3OConfig,
    linear_logprobs,
    linear_logprobs_in_trl,
    p3o_trainer,
)
from fastp3o.integrations.trl.p3o_trainer import shuffled_groups
from tests.fastp3o.integrations.own_trainer import (
    assert_own_update,
    plain_descent,
    recorded,
    varied,
)

WORDS = ["tree", "house", "river", "cloud", "stone", "apple", "eagle", "ocean"]


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL reports that it is used, except in CI."""
    monkeypatch.setenv("CI", "true")


def arguments(folder: str) -> dict:
    settings = {
        "output_dir": folder,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    settings |= {
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_grad_norm": 0.0,
    }
    return settings | {"per_device_train_batch_size": 4, "max_steps": 2}


def parts(model_name: str, prompts: list[dict] | None = None) -> dict:
    model = AutoModelForCausalLM.from_pretrained(model_name, dtype=torch.float32)
    return {
        "model": model,
        "processing_class": AutoTokenizer.from_pretrained(model_name),
        "train_dataset": Dataset.from_list(
            prompts or [{"prompt": f"Say {word}:"} for word in WORDS]
        ),
        "optimizers": plain_descent(model),
    }


def p3o(folder: str, model_name: str, **options) -> P3OTrainer:
    args = TRLP3OConfig(**(arguments(folder) | {"max_completion_length": 6} | options))
    trainer = P3OTrainer(reward_funcs=varied, args=args, **parts(model_name))
    trainer.train()
    return trainer


TWO_MINIBATCHES = {
    "num_generations": 4,
    "steps_per_generation": 2,
    "clipping": "separate",
    "max_steps": 4,
}


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}, {}),
        (TWO_MINIBATCHES | {"beta": 0.0}, {"clipping": "separate", "kl_coef": 0.0}),
    ],
)
def test_the_update_is_fastp3os_own(tmp_path, tiny_model, monkeypatch, options, settings):
    # restored after the test
    monkeypatch.setattr(p3o_trainer, "padded_p3o_loss", p3o_trainer.padded_p3o_loss)
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
    rounds = [
        steps[first : first + generation] for first in range(0, len(steps), generation * iterations)
    ]
    assert_own_update(trainer.model.state_dict(), tiny_model, rounds, iterations, **settings)


def test_siblings_stay_together():
    rows = torch.arange(12)
    shuffled = shuffled_groups({"rows": rows, "list": rows.tolist(), "none": None}, 3)
    assert shuffled["rows"].tolist() == shuffled["list"]
    firsts = shuffled["list"][::3]
    assert sorted(firsts) == [0, 3, 6, 9]
    assert shuffled["list"] == [first + sibling for first in firsts for sibling in range(3)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale_rewards": "group"}, "same difference of rewards"),
        ({"loss_type": "dr_grpo"}, "loss_type belongs to GRPO"),
        ({"vllm_importance_sampling_correction": True}, "set it to False"),
        (
            {"per_device_train_batch_size": 3, "steps_per_generation": 2},
            "must hold all 2 responses",
        ),
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        TRLP3OConfig(**(arguments(str(tmp_path)) | options))


PAIRS = [{"prompt": f"Say {word}:", "chosen": f" {word}", "rejected": " zzz"} for word in WORDS]
SAMPLED = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
TRAINERS = {
    "DPO": (DPOTrainer, DPOConfig, PAIRS, {}, {}),
    "GRPO": (
        GRPOTrainer,
        GRPOConfig,
        None,
        SAMPLED | {"num_iterations": 3},
        {"reward_funcs": varied},
    ),
}


@pytest.mark.parametrize("name", TRAINERS)
def test_three_steps_are_the_same(tmp_path, tiny_model, name, monkeypatch):
    trainer_class, config_class, data, options, more = TRAINERS[name]

    def second_pass(*_):
        raise AssertionError("TRL's own function was called")

    def trained():
        steps = {"max_steps": 3, "logging_strategy": "steps", "logging_steps": 1}
        args = config_class(**(arguments(str(tmp_path)) | steps | options))
        trainer = trainer_class(args=args, **parts(tiny_model, data), **more)
        start = {key: value.clone() for key, value in trainer.model.state_dict().items()}
        trainer.train()
        return start, trainer.model.state_dict(), trainer.state.log_history[:3]

    start, expected, logs = trained()
    monkeypatch.setattr(linear_logprobs.TRLS_OWN, "forward", second_pass)
    with linear_logprobs_in_trl():
        _, found, found_logs = trained()
    for key, weight in expected.items():
        moved = (weight - start[key]).norm()
        assert moved > 1e-4, key
        assert (found[key] - weight).norm() < 1e-3 * moved, key
    for log, found_log in zip(logs, found_logs, strict=True):
        names = [
            key for key, value in log.items() if isinstance(value, float) and "time" not in key
        ]
        assert "entropy" in names
        assert [found_log[key] for key in names] == pytest.approx(
            [log[key] for key in names], rel=1e-3, abs=1e-5
        )
