"""Trains a byte-level BPE tokenizer and writes it with an untrained Llama: a model to start from
without the hub.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel

from fastp3o.cli import parse
from fastp3o.config import Flags, option, required
from fastp3o.errors import UserError
from fastp3o.script import run_script

if TYPE_CHECKING:  # functions import what takes seconds, which --help does without
    from transformers import PreTrainedTokenizerFast

END, PAD = "<|end|>", "<|pad|>"


class TinyLlamaConfig(Flags):
    """Sizes of the model; the defaults give 1.5 M parameters."""

    text: str = required("JSONL file; the tokenizer is trained on all its string fields.")
    output_dir: str = required("Folder for model and tokenizer.")
    vocab_size: int = option(
        4096,
        "Size of the vocabulary, in tokens.",
        at_least=len(ByteLevel.alphabet()) + len((END, PAD)),
    )
    hidden_size: int = option(128, "Width of the hidden states.", at_least=1)
    intermediate_size: int = option(384, "Width of the feed-forward layers.", at_least=1)
    layers: int = option(4, "Number of transformer layers.", at_least=1)
    heads: int = option(4, "Number of attention heads.", at_least=1)
    max_tokens: int = option(512, "Maximum length of a sequence, in tokens.", at_least=1)
    seed: int = option(0, "Seed of the weights.", at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden_size % (2 * self.heads):  # rotary positions turn pairs
            raise UserError(
                f"--hidden_size must be an even multiple of --heads, got {self.hidden_size}"
            )


def main(config: TinyLlamaConfig) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = train_tokenizer(Path(config.text), config.vocab_size)
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            max_position_embeddings=config.max_tokens,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    tokenizer.save_pretrained(config.output_dir)
    model.save_pretrained(config.output_dir)
    print(
        f"{model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} tokens, in {config.output_dir}"
    )


def train_tokenizer(text: Path, vocab_size: int) -> "PreTrainedTokenizerFast":
    """Byte-level BPE with the special tokens END and PAD, which count towards `vocab_size`."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(text), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


def texts(path: Path) -> Iterator[str]:
    """The string fields of a JSONL file. Raises DataError for a line without fields."""
    from fastp3o.data.errors import RecordError
    from fastp3o.data.sources import read_records

    for record in read_records(str(path), "train"):
        content = record.content
        if not isinstance(content, dict):
            problem = (
                content
                if isinstance(content, RecordError)
                else RecordError(None, "an object", content)
            )
            raise problem.at(record.file, record.number)
        yield from (value for value in content.values() if isinstance(value, str))


if __name__ == "__main__":
    run_script(lambda: main(parse(TinyLlamaConfig)))
