"""Two updates of each stage on a real model beside a plain loop in transformers and torch alone:
one response at a time, the losses from the papers, AdamW. fp32; the top layers train. The plain loop
of P3O takes sampled tokens and their rewards from the run's log, and nothing else of it.
"""

from collections.abc import Iterable, Mapping
from itertools import chain, combinations
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from fastp3o import P3OConfig, RewardModelConfig, SFTConfig, train
from fastp3o.run.log import LoggedGroup, read_updates
from tests.fastp3o.real.pretrained import MODEL, PAIRS, examples, logprobs, needs_model
from tests.fastp3o.runs import metrics, weights

pytestmark = needs_model

LAYERS = 4
LEARNING_RATE = 2e-5
P3O_RATE = 1e-6  # moves a response by some tenths of a nat, about as far as the clip range
STEPS = 2  # of fine-tuning and reward model, on the same batch
UPDATES, EPOCHS, RESPONSES = 2, 2, 3
KL_COEF, CLIP_RANGE, RATIO_CAP = 0.05, 0.2, 10.0

# Relative errors. Rounding moves a response's log-prob by some 1e-5 nats, and P3O's gradient by as
# much. AdamW's first steps have the size of the rate whatever the gradient's, also where that is
# rounding alone: weights moved alike to 1.4e-3 (fine-tuning), 1.2e-5 (reward model), 9.6e-4 (P3O).
OF_LOSS, OF_NORM, OF_MOVE = 1e-4, 1e-3, 5e-3
OF_SCORE = 2e-5  # absolute; scores of two responses differ by some 1e-2


class Step(NamedTuple):
    """What an optimizer step reports."""

    loss: float
    grad_norm: float


def settings(folder: Path, learning_rate: float = LEARNING_RATE) -> dict:
    return {
        "model": MODEL,
        "output_dir": str(folder),
        "trainable_layers": LAYERS,
        "learning_rate": learning_rate,
        "precision": "fp32",
        "tokens_per_row": 512,
        "max_prompt_tokens": 64,
        "report_to": "none",
    }


# --- the plain loop -------------------------------------------------------------------------------


def plain_model() -> PreTrainedModel:
    """The model, of which the top layers and the last norm train."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model.requires_grad_(False)
    for part in (*model.model.layers[-LAYERS:], model.model.norm):
        part.requires_grad_(True)
    return model


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


class PlainAdamW:
    """AdamW with the trainer's defaults, of gradients that are clipped to a norm of 1."""

    def __init__(self, parameters: Iterable[nn.Parameter], learning_rate: float = LEARNING_RATE):
        self.parameters = list(parameters)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=1e-6
        )

    def step(self, loss: Tensor) -> Step:
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return Step(loss.item(), norm.item())


def differences(values: Tensor) -> Tensor:
    """v_i − v_j of a prompt's pairs i < j, [K] -> [K (K − 1) / 2]."""
    return torch.stack([first - second for first, second in combinations(values, 2)])


def scaled_rewards(rounds: list[list[LoggedGroup]]) -> list[list[Tensor]]:
    """Rewards by update and prompt, [K] each, over the root mean square of all differences so
    far.
    """
    scaled, seen = [], torch.empty(0)
    for groups in rounds:
        rewards = [torch.tensor([one.reward for one in group.responses]) for group in groups]
        seen = torch.cat([seen, *map(differences, rewards)])
        scaled.append([of_prompt / seen.square().mean().sqrt() for of_prompt in rewards])
    return scaled


def p3o_loss(now: Tensor, old: Tensor, ref: Tensor, rewards: Tensor) -> Tensor:
    """P3O-V2 of one prompt's responses, the mean over their pairs; all [K]."""
    u, u_old = differences(now - ref), differences(old - ref)
    q = (differences(rewards) - KL_COEF * u).detach()
    log_ratios = (now - old).detach()
    products = torch.stack([first + second for first, second in combinations(log_ratios, 2)]).exp()
    weights = q * products.clamp(1 / RATIO_CAP, RATIO_CAP)
    clipped = torch.minimum(torch.maximum(u, u_old - CLIP_RANGE), u_old + CLIP_RANGE)
    return torch.maximum(-weights * u, -weights * clipped).mean() / 2


# --- what is compared -----------------------------------------------------------------------------


def assert_same_steps(reported: list[dict], expected: list[Step]) -> None:
    assert len(reported) == len(expected)
    for line, step in zip(reported, expected, strict=True):
        assert line["loss"] == pytest.approx(step.loss, rel=OF_LOSS, abs=OF_LOSS / 10)
        assert line["grad_norm"] == pytest.approx(step.grad_norm, rel=OF_NORM)


def assert_same_move(folder: Path, start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> None:
    """The weights that a run has saved lie as far and in the same direction from the start as those
    of the plain loop. start: of what trains. end: of all; what is frozen must be equal.
    """
    error = move = 0.0
    saved = weights(str(folder))
    assert set(start) <= set(saved)
    for name, ours in saved.items():
        if name in start:
            error += (ours - end[name]).double().square().sum().item()
            move += (end[name] - start[name]).double().square().sum().item()
        else:
            assert torch.equal(ours, end[name]), name
    assert move > 0
    assert (error / move) ** 0.5 < OF_MOVE


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


# --- the stages -----------------------------------------------------------------------------------


def test_fine_tuning(tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    records = [{"prompt": pair["prompt"], "response": pair["chosen"]} for pair in PAIRS]
    config = SFTConfig(
        **settings(tmp_path),
        train_data="",
        batch_size=len(PAIRS),
        epochs=STEPS,
        max_response_tokens=64,
    )
    train(config, train_data=records)

    model = plain_model()
    start, optimizer = copied(trained(model)), PlainAdamW(trained(model).values())
    prompts, responses = examples(tokenizer, PAIRS)

    def loss() -> Tensor:
        """The mean over all tokens of the chosen responses."""
        pairs = zip(prompts, responses, strict=True)
        return -torch.cat([logprobs(model, prompt, chosen) for prompt, (chosen, _) in pairs]).mean()

    steps = [optimizer.step(loss()) for _ in range(STEPS)]
    assert_same_steps(metrics(str(tmp_path)), steps)
    assert_same_move(tmp_path, start, model.state_dict())


@pytest.fixture(scope="module")
def reward_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of a reward model."""
    folder = tmp_path_factory.mktemp("reward")
    config = RewardModelConfig(
        **settings(folder),
        train_data="",
        batch_size=len(PAIRS),
        epochs=STEPS,
        max_response_tokens=64,
    )
    train(config, train_data=PAIRS)
    return folder


def test_a_reward_model(tokenizer: PreTrainedTokenizerBase, reward_run: Path):
    model = plain_model()
    head = nn.Parameter(torch.zeros(1, model.config.hidden_size))
    parameters = {**trained(model), "score.weight": head}
    start, optimizer = copied(parameters), PlainAdamW(parameters.values())
    prompts, responses = examples(tokenizer, PAIRS)

    def score(prompt: list[int], response: list[int]) -> Tensor:
        ids = torch.tensor([prompt + response])
        return (model.model(ids, use_cache=False).last_hidden_state[0, -1] @ head.T).squeeze()

    def loss() -> Tensor:
        """−log σ of how far the chosen response is ahead, the mean over pairs."""
        ahead = [
            score(prompt, chosen) - score(prompt, rejected)
            for prompt, (chosen, rejected) in zip(prompts, responses, strict=True)
        ]
        return -F.logsigmoid(torch.stack(ahead)).mean()

    steps = [optimizer.step(loss()) for _ in range(STEPS)]
    assert_same_steps(metrics(str(reward_run)), steps)
    assert_same_move(reward_run, start, {**model.state_dict(), "score.weight": head.detach()})


def test_p3o(tokenizer: PreTrainedTokenizerBase, reward_run: Path, tmp_path: Path):
    """From rewards of the reward model, whose scores are transformers' own."""
    asked = PAIRS[:2]
    config = P3OConfig(
        **settings(tmp_path, P3O_RATE),
        updates=UPDATES,
        inner_epochs=EPOCHS,
        prompts_per_update=len(asked),
        prompts_per_minibatch=len(asked),
        responses_per_prompt=RESPONSES,
        max_response_tokens=12,
        log_rollouts_prompts=0,
        prompts="",
        reward=str(reward_run / "model"),
    )
    train(config, prompts=[{"prompt": pair["prompt"]} for pair in asked])
    reported = metrics(str(tmp_path))
    assert all(0 < line["clip_fraction"] < 1 for line in reported)
    rounds = list(read_updates(tmp_path / "rollouts.jsonl"))
    assert [len(groups) for groups in rounds] == [len(asked)] * UPDATES
    ids = dict(zip((pair["prompt"] for pair in asked), examples(tokenizer, asked)[0], strict=True))
    assert_scores_of_transformers(reward_run / "model", ids, chain.from_iterable(rounds))

    model = plain_model()
    start, optimizer = copied(trained(model)), PlainAdamW(trained(model).values(), P3O_RATE)

    def sums(groups: list[LoggedGroup]) -> list[Tensor]:
        """log π of each prompt's responses, [K] each."""
        return [
            torch.stack(
                [logprobs(model, ids[group.prompt], one.ids).sum() for one in group.responses]
            )
            for group in groups
        ]

    def loss(groups: list[LoggedGroup], *inputs: list[Tensor]) -> Tensor:
        """The mean over prompts. inputs: old and reference log-probs, and rewards."""
        return torch.stack(list(map(p3o_loss, sums(groups), *inputs))).mean()

    with torch.no_grad():
        references = [sums(groups) for groups in rounds]
    expected = []
    for groups, reference, rewards in zip(rounds, references, scaled_rewards(rounds), strict=True):
        with torch.no_grad():
            old = sums(groups)
        steps = [optimizer.step(loss(groups, old, reference, rewards)) for _ in range(EPOCHS)]
        expected.append(Step(*torch.tensor(steps).mean(0).tolist()))
    assert_same_steps(reported, expected)
    assert_same_move(tmp_path, start, model.state_dict())


@torch.no_grad()
def assert_scores_of_transformers(
    folder: Path, prompts: Mapping[str, list[int]], groups: Iterable[LoggedGroup]
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for group in groups:
        for one in group.responses:
            score = model(torch.tensor([prompts[group.prompt] + one.ids])).logits.item()
            assert one.reward == pytest.approx(score, abs=OF_SCORE)
