"""Stage 2, reward modelling: a scalar head trained on comparisons, -log σ(r(chosen) - r(rejected)) (Bradley-Terry)."""

import torch.nn.functional as F
from torch import Tensor, nn

from fastp3o.checkpoints import prepare_output_dir
from fastp3o.config import RewardModelConfig
from fastp3o.data import load_preferences
from fastp3o.models import load_reward_model, load_tokenizer, scores, unwrap
from fastp3o.padding import pad
from fastp3o.stage import load_data, make_accelerator
from fastp3o.supervised import Rows, train_supervised


def train(config: RewardModelConfig) -> None:
    """Trains a reward model on preference pairs; `accuracy` is the share of pairs with the chosen response ahead."""
    accelerator = make_accelerator(config)
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

    def sums_of(model: nn.Module, rows: Rows) -> dict[str, Tensor]:
        # One pass over both: chosen first, rejected second, as the halves of a batch.
        batch = pad(
            rows["prompt_ids"] * 2, rows["chosen_ids"] + rows["rejected_ids"], pad_token_id=tokenizer.pad_token_id
        ).to(unwrap(model).device)
        chosen, rejected = scores(model, batch).chunk(2)
        return bradley_terry(chosen, rejected)

    train_supervised(
        accelerator,
        config,
        folder,
        stage="reward model",
        model=load_reward_model(config.model, trust_remote_code=config.trust_remote_code),
        tokenizer=tokenizer,
        train_data=train_data,
        eval_data=eval_data,
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
