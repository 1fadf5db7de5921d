"""Stage 2, reward modelling: a scalar head trained on comparisons, -log σ(r(chosen) - r(rejected)) (Bradley-Terry)."""

import torch.nn.functional as F
from torch import Tensor, nn

from fastp3o.config import RewardModelConfig
from fastp3o.data import load_preferences
from fastp3o.models.loading import load_reward_model, load_tokenizer
from fastp3o.models.packed_model import scores
from fastp3o.packing.pack import PackedRow, pack
from fastp3o.precision import precision_of
from fastp3o.stages.setup import load_data, make_accelerator
from fastp3o.stages.supervised import Rows, train_supervised
from fastp3o.training.checkpoints import prepare_output_dir


def train(config: RewardModelConfig) -> None:
    """Trains a reward model on preference pairs; `accuracy` is the share of pairs with the chosen response ahead."""
    precision = precision_of(config.precision, automatic="bf16-autocast")
    accelerator = make_accelerator(config, precision)
    folder = prepare_output_dir(accelerator, config)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    train_data, eval_data = load_data(
        accelerator,
        load_preferences,
        config.train_data,
        config.eval_data,
        tokenizer,
        config,
        max_response_tokens=config.max_response_tokens,
    )

    model = load_reward_model(config.model, trust_remote_code=config.trust_remote_code)
    model.check_reach(config.max_prompt_tokens + config.max_response_tokens)

    def pack_rows(rows: Rows) -> list[PackedRow]:
        return pack(
            rows["prompt_ids"],
            list(zip(rows["chosen_ids"], rows["rejected_ids"], strict=True)),
            tokens_per_row=config.tokens_per_row,
            share_prompts=config.share_prompts,
        )

    def sums_of(model: nn.Module, row: PackedRow) -> dict[str, Tensor]:
        chosen, rejected = scores(model, row).view(-1, 2).unbind(1)
        return bradley_terry(chosen, rejected)

    train_supervised(
        accelerator,
        config,
        folder,
        stage="reward model",
        precision=precision,
        model=model,
        tokenizer=tokenizer,
        train_data=train_data,
        eval_data=eval_data,
        pack_rows=pack_rows,
        sums_of=sums_of,
        size_of=lambda rows: len(rows["chosen_ids"]),
    )


def bradley_terry(chosen: Tensor, rejected: Tensor) -> dict[str, Tensor]:
    """Sums over P pairs of the loss, of correct decisions (a tie counts a half) and of the margin; scores [P] fp32."""
    margin = chosen - rejected
    return {
        "loss": -F.logsigmoid(margin).sum(),
        "accuracy": ((margin.sign() + 1) / 2).sum(),
        "margin": margin.sum(),
    }
