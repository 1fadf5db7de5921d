"""Stage 1, supervised fine-tuning: maximum likelihood of the demonstrations' tokens."""

from torch import Tensor, nn

from fastp3o.config import SFTConfig
from fastp3o.data import load_demonstrations
from fastp3o.models.loading import load_policy, load_tokenizer
from fastp3o.models.packed_model import scored_logprobs
from fastp3o.models.trainable import choose_trainable
from fastp3o.packing.pack import PackedRow, pack
from fastp3o.precision import precision_of
from fastp3o.stages.setup import load_data, make_accelerator
from fastp3o.stages.supervised import Rows, train_supervised
from fastp3o.training.checkpoints import prepare_output_dir


def train(config: SFTConfig) -> None:
    """Fine-tunes a causal LM on demonstrations; `loss` is in nats per scored token."""
    precision = precision_of(config.precision, automatic="bf16-autocast")
    accelerator = make_accelerator(config, precision)
    folder = prepare_output_dir(accelerator, config)
    tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
    train_data, eval_data = load_data(
        accelerator,
        load_demonstrations,
        config.train_data,
        config.eval_data,
        tokenizer,
        config,
        max_response_tokens=config.max_response_tokens,
    )

    model = load_policy(config.model, trust_remote_code=config.trust_remote_code)
    model.check_reach(config.max_prompt_tokens + config.max_response_tokens)
    choose_trainable(model, config)

    def pack_rows(rows: Rows) -> list[PackedRow]:
        return pack(
            rows["prompt_ids"],
            [[ids] for ids in rows["response_ids"]],
            tokens_per_row=config.tokens_per_row,
            score_prompts=config.train_on_prompt,
        )

    def sums_of(model: nn.Module, row: PackedRow) -> dict[str, Tensor]:
        return {"loss": -scored_logprobs(model, row).sum()}

    def scored_tokens(rows: Rows) -> int:
        tokens = sum(map(len, rows["response_ids"]))
        return tokens + sum(len(ids) - 1 for ids in rows["prompt_ids"]) if config.train_on_prompt else tokens

    train_supervised(
        accelerator,
        config,
        folder,
        stage="SFT",
        precision=precision,
        model=model,
        tokenizer=tokenizer,
        train_data=train_data,
        eval_data=eval_data,
        pack_rows=pack_rows,
        sums_of=sums_of,
        size_of=scored_tokens,
    )
