"""Comparisons by a language model, for `--reward judge`: one at an endpoint, or one on this
machine.
"""

import json
import threading
from math import nan
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fastp3o.calls.answers import Answers
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.sharding import FrozenModel, with_tensor_group
from fastp3o.packing.pack import Packing, pack
from fastp3o.packing.tables import sums_by_group
from fastp3o.rewards.comparisons import Comparison, JudgedPairs
from fastp3o.rewards.judge import (
    LETTERS_AMONG,
    PATTERN,
    EndpointJudge,
    parse_verdict,
    plain_text,
    question,
)
from fastp3o.rewards.verdicts import Verdict
from fastp3o.rollouts.groups import Group, Prompt, Response, token_ids

POINTS = {Verdict.FIRST: 1.0, Verdict.TIE: 0.5, Verdict.SECOND: 0.0, Verdict.NONE: nan}
# The question to a model that does not explain: its next token is the verdict.
ONE_LETTER = (
    PATTERN.partition(" Explain your comparison")[0]
    + " Answer with one letter: A if response A is better, B if response B is better."
)


class EndpointComparisons(JudgedPairs):
    """What an endpoint's model says of each pair in both orders: the mean of its two probabilities,
    where the server gives log-probs of the verdict's letter, else 1, 1/2 or 0 by the verdict, a
    half if the orders disagree.

    Each verdict is in the judge's file before it counts, also that there was none: a run that
    continues asks for none of them again, and has the bits of one that was not stopped.
    """

    def __init__(self, judge: EndpointJudge):
        self.judge = judge

    def check(self, prompt: Prompt, siblings: int = 2) -> None:
        """Asks about two responses to a prompt, the words "response" and "other". Raises
        EndpointError as a call does, and says if the answer has no verdict, or no log-probs.
        """
        text = question(judged_text(prompt), "response", "other", self.judge.template)
        answer = self.judge.endpoint.ask(text, threading.Event(), logprobs=self.judge.logprobs)
        if parse_verdict(answer) is Verdict.NONE:
            tqdm.write(
                f"warning: the judge's answer has no verdict, [[A]], [[B]] or [[C]]: {answer.text!r:.300}"
            )
        elif self.judge.logprobs and answer.preferred is None:
            tqdm.write(
                "warning: the judge's server gives no log-probs of the verdict's letter, so that a verdict counts 1, "
                f"0.5 or 0. vLLM gives them with --max-logprobs {LETTERS_AMONG} or more"
            )

    def ask(self, comparisons: list[Comparison]) -> list[float]:
        """Raises EndpointError if the endpoint refuses or remains unavailable; what it has answered
        is in the file.
        """
        # Both orders are asked in any case: a pair is the same pair the other way round.
        keys: list[str] = []
        missing: dict[str, tuple[str, str, str]] = {}
        for prompt, first, second, _ in comparisons:
            texts = sorted((first.text, second.text))
            asked = judged_text(prompt), texts[0], texts[1]
            keys.append(self.judge.key(*asked))
            if keys[-1] not in self.judge.file.verdicts:
                missing[keys[-1]] = asked
        for _ in Answers(self.judge.compare, missing.items(), self.judge.requests):
            pass  # `compare` keeps each verdict
        self.judge.report_unusable()

        # How much the first response is preferred, which was asked as the second where its text is
        # the later one.
        file, values = self.judge.file, []
        for key, (_, first, second, _) in zip(keys, comparisons, strict=True):
            value = file.preferred.get(key, POINTS[file.verdicts[key]])
            values.append(1 - value if first.text > second.text else value)
        return values


class LocalComparisons(JudgedPairs):
    """What a causal LM on this machine answers to "A or B?" in one pass: P(A) / (P(A) + P(B)) of
    its next token, the mean of both orders. Arguments are a ModelReward's; template: a question
    that ends with the demand for a letter.
    """

    together = True

    def __init__(
        self,
        model: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        *,
        device: torch.device,
        packing: Packing,
        mesh: DeviceMesh | None = None,
        offload: bool = False,
    ):
        self.model, self.device = FrozenModel(model, device, mesh, offload=offload), device
        self.tokenizer, self.template, self.packing = tokenizer, template, packing
        space = "" if tokenizer.chat_template is not None else " "
        self.letters = [
            tokenizer(space + letter, add_special_tokens=False).input_ids for letter in "AB"
        ]

    def ask(self, comparisons: list[Comparison]) -> list[float]:
        """Raises UserError for a question that is longer than the model's positions."""
        # Each pair in both orders, one after the other.
        groups = []
        for prompt, first, second, _ in comparisons:
            text = judged_text(prompt)
            groups += [
                self.group(text, first.text, second.text),
                self.group(text, second.text, first.text),
            ]
        groups, local = with_tensor_group(self.model.model, groups)
        self.model.model.check_reach(max(len(group.prompt.ids) for group in groups) + 1)
        rows = [row.to(self.device) for row in pack(*token_ids(groups), self.packing)]
        row_logprobs = self.model.map_rows(rows, labeled_logprobs)
        # log P(A), log P(B) of each question.
        logprobs = sums_by_group(rows, row_logprobs)[local].float().cpu()
        preferred = (logprobs[:, 0] - logprobs[:, 1]).sigmoid()
        as_first, as_second = preferred[::2], 1 - preferred[1::2]
        return ((as_first + as_second) / 2).tolist()

    def group(self, prompt: str, first: str, second: str) -> Group:
        """The question, and both answers to it."""
        text = question(prompt, first, second, self.template)
        if self.tokenizer.chat_template is not None:
            chat = [{"role": "user", "content": text}]
            ids: Any = self.tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_dict=False
            )
        else:
            ids = self.tokenizer(text + "\n\nAnswer:").input_ids
        return Group(Prompt(text, ids), [Response(letter, "", False) for letter in self.letters])


def judged_text(prompt: Prompt) -> str:
    """A prompt as the judge reads it: messages as the record has them, else the text that the
    policy sees.
    """
    written = json.loads(prompt.given)["prompt"] if prompt.given else prompt.text
    return plain_text(written) if isinstance(written, str | list) else prompt.text
