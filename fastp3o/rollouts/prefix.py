"""Text before every prompt that is sampled, such as examples of good answers (URIAL, arXiv
2312.01552).
"""

from transformers import PreTrainedTokenizerBase

from fastp3o.data.encoding import ids_added_first
from fastp3o.data.tokens import Continuation, tokenize
from fastp3o.files import read_text
from fastp3o.rollouts.groups import Group, Prompt, Sampler


class Prefix:
    """The token ids of a file's text; empty without a file. Names of special tokens in the text are
    plain text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, path: str | None):
        self.ids = tokenize(tokenizer, [read_text(path, "prefix") if path else ""], control=False)[
            0
        ]
        self.continuation = Continuation(tokenizer)
        self.firsts = [ids_added_first(tokenizer), [tokenizer.bos_token_id]]

    def before(self, prompt: Prompt) -> Prompt:
        """The prompt with the prefix inserted after the tokens that the tokenizer or chat template
        puts first. Its text is unchanged.
        """
        first = next((one for one in self.firsts if one and prompt.ids[: len(one)] == one), [])
        rest = prompt.ids[len(first) :]
        return prompt._replace(
            ids=first + self.ids + (self.continuation.moved(rest) if self.ids else rest)
        )

    def before_each(self, sampler: Sampler) -> Sampler:
        """A sampler that responds to prompts with the prefix. Its groups have the prompts without
        the prefix.
        """
        return lambda prompts, *further: [
            Group(prompt, responses)
            for prompt, (_, responses) in zip(
                prompts, sampler(list(map(self.before, prompts)), *further), strict=True
            )
        ]
