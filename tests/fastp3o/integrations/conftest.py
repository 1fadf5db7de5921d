"""Mistakes between a loss and another trainer, and the tests that would notice.

your own loop:
- hidden states or mask shifted, prompts counted
    tests/kernels/test_response_tokens.py::test_bad_batches
- all first responses, then all second ones
    tests/kernels/test_response_tokens.py::test_first_and_second_responses_in_two_halves
- all of these, on a padded batch
    test_readme.py::test_the_plain_loop_is_fastp3os_own_update
- the README's example
    tests/test_readme.py::test_the_loss_before_and_after_is_the_same
- `output_hidden_states`
    tests/kernels/test_exposed_head.py::test_hidden_states_that_the_model_returns_are_those_that_it_exposes

TRL's GRPOTrainer:
- siblings are shuffled apart
    test_trl_p3o.py::test_siblings_stay_together
- scaled rewards make all pairs the same
    test_trl_p3o.py::test_options_that_would_be_ignored_are_refused
- masked completions are empty
    test_trl_p3o.py::test_masked_completions_have_no_gradient

TRL's DPO, GRPO, KTO, RLOO:
- log-probs, entropy, mean logit, top-1
    test_trl_linear_logprobs.py::test_three_steps_are_the_same
- objectives of `linear_loss` instead of theirs
    test_trl_losses.py::test_loss_and_gradient_are_trls

DDP, FSDP2:
- unreduced gradients, a sharded head, groups, tied weights, bf16, checkpointing, `full_tensor()`
    tests/kernels/test_exposed_head.py::test_two_processes_have_the_gradients_of_one
- autocast
    tests/kernels/test_exposed_head.py::test_autocast_holds
- GradScaler
    tests/kernels/test_exposed_head.py::test_a_scaler_of_gradients_scales_them
- checkpointing, LoRA
    tests/kernels/test_exposed_head.py::test_adapters_count_and_checkpointing_changes_nothing
"""

import pytest


@pytest.fixture(autouse=True)
def no_telemetry(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL reports that it is used, except in CI."""
    monkeypatch.setenv("CI", "true")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints a table of what the tests of losses recorded, whichever process ran them."""
    rows = [
        row
        for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
        for name, row in report.user_properties
        if name == "against TRL" and report.when == "call"
    ]
    if rows:
        terminalreporter.section("our losses against TRL's")
        header = "objective", "ours", "TRL's", "apart", "gradients apart, relative"
        for row in [header, *rows]:
            terminalreporter.line("{:<20}{:>10}{:>12}{:>10}  {}".format(*row))
