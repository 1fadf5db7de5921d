"""Talk to a model, or to two of them that answer the same messages.

fastp3o chat --model runs/p3o/model
fastp3o chat --model runs/p3o/model --beside runs/sft/model --temperature 0

A model with a chat template is told the whole conversation, its own answers included. To one
without, a message is the text that it continues; --turn puts it into a conversation of plain text:
fastp3o chat --model MODEL --turn '\\n\\nHuman: {}\\n\\nAssistant:' --stop '\\n\\nHuman:'
"""

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fastp3o.cli import parse
from fastp3o.config import LARGEST_INT, Flags, option, required
from fastp3o.errors import UserError, visible

if TYPE_CHECKING:
    from fastp3o.data.encoding import Encoder
    from fastp3o.rollouts.transformers_sampler import TransformersSampler

NEW, QUIT = "/new", "/quit"


class ChatConfig(Flags):
    """Talk to a model, or to two that answer the same messages."""

    model: str = required("Model to talk to: a Hugging Face causal LM, as a folder or a hub name.")
    beside: str | None = option(
        None, "Second model, whose answers are shown beside the first's. Default: none."
    )
    system: str | None = option(
        None, "System message, for models with a chat template. Default: none."
    )
    turn: str = option(
        "{}",
        "What a message becomes for a model without a chat template: {} stands for the message, \\n for a new line. "
        "The default continues each message alone; with any other the conversation so far goes before it.",
    )
    stop: str | None = option(
        None,
        "Text that ends an answer, beside the model's end-of-sequence; \\n stands for a new line. Default: none.",
    )
    max_prompt_tokens: int = option(
        4096,
        "Maximum length of a conversation, in tokens; longer ones lose their beginning.",
        at_least=1,
    )
    max_response_tokens: int = option(512, "Maximum length of an answer, in tokens.", at_least=1)
    temperature: float = option(
        1.0, "Sampling temperature; 0 takes the most likely token each time.", at_least=0.0
    )
    seed: int = option(0, "Seed of the answers.", at_least=0, below=LARGEST_INT)
    trust_remote_code: bool = option(False, "Run code that comes with the models.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{}" not in self.turn:
            raise UserError(
                f"--turn must hold {{}}, which stands for the message, got {self.turn!r}"
            )


@dataclass
class Speaker:
    """A model and its side of the conversation: messages for a chat template, or else text."""

    name: str
    encoder: "Encoder"
    sampler: "TransformersSampler"
    config: ChatConfig
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""

    def __post_init__(self) -> None:
        self.begin()

    @property
    def chats(self) -> bool:
        return self.encoder.tokenizer.chat_template is not None

    def begin(self) -> None:
        """Forgets the conversation."""
        self.text = ""
        self.messages = (
            [{"role": "system", "content": self.config.system}] if self.config.system else []
        )

    def answer(self, message: str, seed: int) -> tuple[str, bool]:
        """The answer, and whether the conversation's beginning was cut off for it. Raises UserError
        for a message that the tokenizer or the chat template cannot take.
        """
        from fastp3o.data.errors import RecordError
        from fastp3o.data.layouts import Part
        from fastp3o.rollouts.groups import Prompt

        turn = with_new_lines(self.config.turn)
        said: Any = [*self.messages, {"role": "user", "content": message}]
        if not self.chats:
            said = (self.text if turn != "{}" else "") + turn.replace("{}", message)
        try:
            (encoded,) = self.encoder.encode([self.encoder.render(Part("message", said), ())])
        except RecordError as error:
            raise UserError(str(error)) from error
        if isinstance(encoded, RecordError):
            raise UserError(str(encoded))
        ((response,),) = (
            group.responses
            for group in self.sampler([Prompt(encoded.prompt, encoded.prompt_ids)], 1, seed)
        )
        text = response.text
        if self.chats:
            self.messages = [*said, {"role": "assistant", "content": text.strip()}]
        else:
            self.text = said + text
        return text, encoded.prompt_truncated


def main() -> None:
    config = parse(ChatConfig)
    console = Console()
    names = [config.model, *([config.beside] if config.beside else [])]
    with console.status("loading"):
        speakers = [load(name, config) for name in names]
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{NEW} begins another conversation, {QUIT} or Ctrl-D ends.")
    number = 0
    while (message := read_message("> " if terminal else "")) is not None:
        if message == NEW:
            for speaker in speakers:
                speaker.begin()
        elif message:
            try:
                with console.status("answering"):
                    answers = [
                        speaker.answer(message, (config.seed + number) % LARGEST_INT)
                        for speaker in speakers
                    ]
            except UserError as error:
                print(f"error: {error}", file=sys.stderr)
                continue
            number += 1
            show(console, speakers, answers)


def read_message(prompt: str) -> str | None:
    """A line without white space around it; None where the conversation ends."""
    try:
        message = input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        return None
    return None if message == QUIT else message


def load(name: str, config: ChatConfig) -> Speaker:
    # These take seconds, which --help does without.
    import torch
    from transformers.utils.logging import disable_progress_bar

    from fastp3o.data.encoding import Encoder, response_ends
    from fastp3o.models.loading import load_policy
    from fastp3o.models.tokenizer import load_tokenizer
    from fastp3o.rollouts.groups import SamplingSettings
    from fastp3o.rollouts.transformers_sampler import TransformersSampler

    disable_progress_bar()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(name, trust_remote_code=config.trust_remote_code)
    if config.system and tokenizer.chat_template is None:
        raise UserError(f"--system has no effect without a chat template, and {name} has none")
    # As transformers loads it on a GPU: the dtype of the weights.
    policy = load_policy(
        name,
        device=device,
        dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
        trust_remote_code=config.trust_remote_code,
    )
    policy.temperature = config.temperature or 1.0
    stops = (with_new_lines(config.stop),) if config.stop else ()
    settings = SamplingSettings(top_k=0 if config.temperature else 1, stops=stops)
    sampler = TransformersSampler(
        policy,
        tokenizer,
        max_response_tokens=config.max_response_tokens,
        batch_size=1,
        settings=settings,
    )
    ends = response_ends(tokenizer, policy.model.generation_config)
    return Speaker(
        name, Encoder(tokenizer, config.max_prompt_tokens, None, ends=ends), sampler, config
    )


def with_new_lines(text: str) -> str:
    """A shell's text, in which \\n stands for a new line."""
    return text.replace("\\n", "\n")


def show(console: Console, speakers: list[Speaker], answers: list[tuple[str, bool]]) -> None:
    """One answer as text, two side by side. What a policy writes is shown without control
    characters.
    """
    if len(answers) == 1:
        console.print(Text(visible(answers[0][0].strip())))
    else:
        columns = [Column(Text(speaker.name), ratio=1) for speaker in speakers]
        table = Table(*columns, expand=True)
        table.add_row(*(Text(visible(text.strip())) for text, _ in answers))
        console.print(table)
    for speaker, (_, truncated) in zip(speakers, answers, strict=True):
        if truncated:
            print(
                f"{speaker.name} saw the conversation without its beginning (--max_prompt_tokens)",
                file=sys.stderr,
            )
