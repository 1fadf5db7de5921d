"""Stage 1, supervised fine-tuning: maximum likelihood of the demonstrations' tokens."""

from torch import Tensor, nn

from fastp3o.checkpoints import prepare_output_dir
from fastp3o.config import SFTConfig
from fastp3o.data import load_demonstrations
from fastp3o.models import load_policy, load_tokenizer, scored_logprobs, unwrap
from fastp3o.padding import pad
from fastp3o.stage import load_data, make_accelerator
from fastp3o.supervised import Rows, train_supervised


def train(config: SFTConfig) -> None:
    """Fine-tunes a causal LM on demonstrations; `loss` is in nats per scored token."""
    accelerator = make_accelerator(config)
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

    def sums_of(model: nn.Module, rows: Rows) -> dict[str, Tensor]:
        batch = pad(
            rows["prompt_ids"],
            rows["response_ids"],
            pad_token_id=tokenizer.pad_token_id,
            score_prompts=config.train_on_prompt,
        ).to(unwrap(model).device)
        return {"loss": -scored_logprobs(model, batch).sum()}

    def scored_tokens(rows: Rows) -> int:
        tokens = sum(map(len, rows["response_ids"]))
        return tokens + sum(len(ids) - 1 for ids in rows["prompt_ids"]) if config.train_on_prompt else tokens

    train_supervised(
        accelerator,
        config,
        folder,
        stage="SFT",
        model=load_policy(config.model, trust_remote_code=config.trust_remote_code),
        tokenizer=tokenizer,
        train_data=train_data,
        eval_data=eval_data,
        sums_of=sums_of,
        size_of=scored_tokens,
    )
