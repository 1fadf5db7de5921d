"""Trains a byte-level BPE tokenizer and writes it with an untrained Llama: a model to start from without the hub."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from fastp3o.config import Flags, parse
from fastp3o.data.errors import RecordError
from fastp3o.data.sources import read_records
from fastp3o.script import run_script

END, PAD = "<|end|>", "<|pad|>"


@dataclass(frozen=True, kw_only=True)
class TinyLlamaConfig(Flags):
    """Sizes of the model; the defaults give 1.5 M parameters."""

    text: str = field(metadata={"help": "JSONL file; the tokenizer is trained on all its string fields."})
    output_dir: str = field(metadata={"help": "Folder for model and tokenizer."})
    vocab_size: int = field(default=4096, metadata={"help": "Tokens of the vocabulary."})
    hidden_size: int = field(default=128, metadata={"help": "Width of the hidden states."})
    intermediate_size: int = field(default=384, metadata={"help": "Width of the feed-forward layers."})
    layers: int = field(default=4, metadata={"help": "Transformer layers."})
    heads: int = field(default=4, metadata={"help": "Attention heads."})
    max_tokens: int = field(default=512, metadata={"help": "Longest sequence."})
    seed: int = field(default=0, metadata={"help": "Seed of the weights."})

    def __post_init__(self) -> None:
        self.check_at_least(1, "hidden_size", "intermediate_size", "layers", "heads", "max_tokens")
        self.check_at_least(0, "seed")
        self.check_at_least(len(ByteLevel.alphabet()) + len((END, PAD)), "vocab_size")
        # Rotary positions turn pairs.
        self.check(self.hidden_size % (2 * self.heads) == 0, "hidden_size", "an even multiple of --heads")


def main(config: TinyLlamaConfig) -> None:
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
    print(f"{model.num_parameters() / 1e6:.2f} M parameters, {len(tokenizer)} tokens, in {config.output_dir}")


def train_tokenizer(text: Path, vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with the special tokens END and PAD, which count towards `vocab_size`."""
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
    for record in read_records(str(path), "train"):
        content = record.content
        if not isinstance(content, dict):
            problem = content if isinstance(content, RecordError) else RecordError(None, "an object", content)
            raise problem.at(record.file, record.number)
        yield from (value for value in content.values() if isinstance(value, str))


if __name__ == "__main__":
    run_script(lambda: main(parse(TinyLlamaConfig)))
