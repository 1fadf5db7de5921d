"""TRL's own trainers on `linear_logprobs`: the same weights and the same metrics."""

import pytest
import torch

pytest.importorskip("trl", reason="the extra `integrations` is not installed")
import trl.trainer.utils
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from fastp3o.integrations.trl import linear_logprobs, linear_logprobs_in_trl
from tests.fastp3o.integrations.own_trainer import varied
from tests.fastp3o.integrations.trl_runs import WORDS, arguments, parts

PAIRS = [{"prompt": f"Say {word}:", "chosen": f" {word}", "rejected": " zzz"} for word in WORDS]
SAMPLED = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1}
TRAINERS = {
    "DPO": (DPOTrainer, DPOConfig, PAIRS, {}, {}),
    "GRPO": (GRPOTrainer, GRPOConfig, None, SAMPLED | {"num_iterations": 3}, {"reward_funcs": varied}),
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
    assert trl.trainer.utils._ChunkedLogProbFunction is linear_logprobs.TRLS_OWN
    for key, weight in expected.items():
        moved = (weight - start[key]).norm()
        assert moved > 1e-4, key
        assert (found[key] - weight).norm() < 1e-3 * moved, key
    for log, found_log in zip(logs, found_logs, strict=True):
        names = [key for key, value in log.items() if isinstance(value, float) and "time" not in key]
        assert "entropy" in names
        assert [found_log[key] for key in names] == pytest.approx([log[key] for key in names], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("outputs", [("log_probs",), linear_logprobs.OUTPUTS])
def test_scales_caps_and_entropys_gradient_are_trls(outputs):
    torch.manual_seed(0)
    hidden, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    given = hidden, weight, torch.randn(11), torch.randint(0, 11, (5,)), 0.7, 32768, 2.0, 1.5, outputs
    results = [function.apply(*given) for function in (linear_logprobs.TRLS_OWN, linear_logprobs.LinearLogprobsOfTRL)]
    expected, found = (
        [*values, *torch.autograd.grad(sum(value.sum() for value in values[:2] if value is not None), (hidden, weight))]
        for values in results
    )
    for values in zip(found, expected, strict=True):
        assert (values[0] is None) == (values[1] is None)
        if values[0] is not None:
            torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
