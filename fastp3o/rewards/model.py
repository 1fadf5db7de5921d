"""Rewards by models: the scores of a reward model, which may have another vocabulary."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import get_logger

from fastp3o.config import LARGEST_INT
from fastp3o.data.encoding import (
    ChatTemplate,
    Encoder,
    ids_added_first,
    name_pattern,
    response_ends,
    split_bos,
)
from fastp3o.data.errors import Found, RecordError, is_blank
from fastp3o.data.layouts import Fields, Message, Part
from fastp3o.data.tokens import BEGINNING, Continuation, special_tokens
from fastp3o.models.overflow import Overflow, first_overflow, overflow_in_fp16
from fastp3o.models.packed_model import PackedModel, scores, vectors
from fastp3o.models.preference import leads_of_groups
from fastp3o.models.sharding import FrozenModel, with_tensor_group
from fastp3o.packing.pack import Packing, pack
from fastp3o.packing.packed_row import Ids, PackedRow
from fastp3o.packing.tables import by_group
from fastp3o.rewards.comparisons import RelativeReward
from fastp3o.rollouts.groups import Group, Prompt, Response, token_ids

logger = get_logger(__name__)
# For private use: neither templates nor tokenizers know it.
NAME = "\ue002"


# --- scores ---------------------------------------------------------------------------------------


class ModelReward:
    """Scores of a reward model. device: of the computation. mesh: of processes over which the model
    is spread; None for one. offload: keeps the model on the CPU between uses. reading: how a
    Translation reads prompts that are messages.
    """

    def __init__(
        self,
        model: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        policy_tokenizer: PreTrainedTokenizerBase,
        *,
        device: torch.device,
        packing: Packing,
        mesh: DeviceMesh | None = None,
        offload: bool = False,
        reading: Mapping[str, Any] | None = None,
    ):
        self.model = FrozenModel(model, device, mesh, offload=offload)
        self.device, self.packing = device, packing
        self.shares_vocabulary = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
        # The tokens of messages are then those that the policy's template makes.
        templates = tokenizer.chat_template, policy_tokenizer.chat_template
        self.has_other_template = (
            self.shares_vocabulary and None not in templates and templates[0] != templates[1]
        )
        self.translate = Translation(policy_tokenizer, tokenizer, **(reading or {}))

    def __call__(self, groups: list[Group]) -> Tensor:
        return self.outputs(groups, scores)

    def outputs(
        self, groups: list[Group], read: Callable[[nn.Module, PackedRow], Tensor]
    ) -> Tensor:
        """What `read` gives each response of a row, in one pass over each: [P, K], or vectors [P,
        K, n].
        """
        groups, local = with_tensor_group(self.model.model, groups)
        rows = self.rows(groups)
        return by_group(rows, self.model.map_rows(rows, read))[local].cpu()

    def rows(self, groups: list[Group]) -> list[PackedRow]:
        prompt_ids, response_ids = (
            self.closed(groups) if self.shares_vocabulary else self.translate(groups)
        )
        return [row.to(self.device) for row in pack(prompt_ids, response_ids, self.packing)]

    def overflow(self, groups: list[Group]) -> Overflow | None:
        """The values that overflow fp16 where these groups are scored, on any process: all must
        call it.
        """
        groups, _ = with_tensor_group(self.model.model, groups)
        return first_overflow(self.model.map_rows(self.rows(groups), overflow_in_fp16))

    def closed(self, groups: list[Group]) -> tuple[list[Ids], list[list[Ids]]]:
        """The ids of prompts and responses. A response that has ended, by whichever of the policy's
        ends, ends as those that the model was trained on.
        """
        prompt_ids, response_ids = token_ids(groups)
        for (prompt, responses), ids in zip(groups, response_ids, strict=True):
            closing = self.translate.closing(prompt)
            for place, response in enumerate(responses):
                if response.finished:
                    ended = response.ids[-1] in self.translate.no_text  # otherwise by a text
                    ids[place] = [*(response.ids[:-1] if ended else response.ids), closing]
        return prompt_ids, response_ids


class PreferenceModelReward(RelativeReward, ModelReward):
    """Comparisons by a preference model: one pass over each response gives its vector, and two
    vectors a comparison.
    """

    def matrix(self, groups: list[Group]) -> Tensor:
        """P(response i is better than response j) − 1/2 for the responses of each group, [P, K, K]
        fp32 on the CPU.
        """
        return leads_of_groups(self.outputs(groups, vectors))


# --- responses in the vocabulary of another tokenizer ---------------------------------------------


class Translation:
    """Texts of a policy in the tokens of another model, as the loader makes them of that model's
    training data: its own chat template, if it has one, writes prompts that are messages, and
    responses as the assistant's. Messages that this template refuses go to the model as the text
    that the policy's has made of them, which is said once.

    max_prompt_tokens, chat_template_kwargs, clock: an Encoder's, for messages; variables that the
    template does not read are left out.
    """

    def __init__(
        self,
        policy: PreTrainedTokenizerBase,
        scorer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int = LARGEST_INT,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        self.policy, self.scorer = policy, scorer
        self.encoder: Encoder | None = None
        if scorer.chat_template is not None:
            reads = ChatTemplate(scorer).reads
            settings = {
                name: value
                for name, value in (chat_template_kwargs or {}).items()
                if reads(name, [])
            }
            self.encoder = Encoder(
                scorer, max_prompt_tokens, None, chat_template_kwargs=settings, **options
            )
        self.said = False
        self.first_ids, self.continuation = ids_added_first(scorer), Continuation(scorer)
        self.controls = control_tokens(policy)
        names = set(self.controls.values())
        self.names = name_pattern(names)
        self.ends = response_ends(scorer)
        self.policys_first = ids_added_first(policy)
        self.no_text = {*self.controls, *response_ends(policy).ids}
        self.foreign = re.compile(
            f"({name_pattern(set(control_tokens(scorer).values()) - names).pattern})"
        )

    def __call__(self, groups: list[Group]) -> tuple[list[Ids], list[list[Ids]]]:
        """The ids of prompts and responses; a response keeps its end if it had one."""
        pairs = [self.messages(group) or self.as_text(group) for group in groups]
        return [prompt for prompt, _ in pairs], [responses for _, responses in pairs]

    def as_text(self, group: Group) -> tuple[Ids, list[Ids]]:
        prompt_ids = self.prompt_ids(group.prompt)
        return prompt_ids, self.response_ids(group, prompt_ids)

    def messages(self, group: Group) -> tuple[Ids, list[Ids]] | None:
        """The ids where the prompt is messages and the model's own template takes them, None
        elsewhere.
        """
        record = json.loads(group.prompt.given) if group.prompt.given else {}
        if self.encoder is None or not isinstance(record.get("prompt"), list):
            return None
        try:
            fields = self.encoder.template.fields_read(record)
            rendered = self.encoder.render(Part("prompt", record["prompt"]), (), fields)
            (encoded,) = self.encoder.encode([rendered])
            if isinstance(encoded, RecordError):
                raise encoded
            variables = self.encoder.template.variables(fields)
            written = (
                self.reply(
                    self.encoder,
                    record["prompt"],
                    rendered.prompt,
                    encoded.prompt_ids,
                    response,
                    variables,
                )
                for response in group.responses
            )
            return encoded.prompt_ids, list(written)
        except RecordError as refusal:
            if not self.said:
                logger.warning(
                    f"the chat template of {self.scorer.name_or_path} does not take all messages ({refusal.reason}, "
                    f"got {refusal.got}): that model reads the others as the policy's template writes them"
                )
            self.said = True
            return None

    def reply(
        self,
        encoder: Encoder,
        asked: list[Message],
        before: str,
        before_ids: Ids,
        response: Response,
        variables: Fields,
    ) -> Ids:
        """The ids of a response as the assistant's message. before: the template's text of what is
        asked, with its ids. Names of special tokens in it are text, as the policy wrote them: the
        template writes a mark in their place.
        """
        names = encoder.template.special.findall(response.text)
        message = {
            "role": "assistant",
            "content": encoder.template.special.sub(NAME, response.text),
        }
        text = encoder.template.apply(
            [*asked, message], "response", variables, add_generation_prompt=False
        )
        first, *others = text.removeprefix(before).split(NAME)
        if not text.startswith(before) or len(others) != len(names):
            expected = "a chat template that writes the messages before a reply the same with and without the reply"
            raise RecordError("response", expected, Found("one that changes them"))
        parts = [(first, True)]
        for name, part in zip(names, others, strict=True):
            parts += [(name, False), (part, True)]
        ids: Ids = []
        for part, control in parts:
            last = (ids or before_ids)[-1]
            ids += self.continuation.ids([part], last, control=control)[0] if part else []
        try:
            ended = encoder.closed(ids, "response", templated=True)
        except RecordError:
            if not is_blank(response.text):
                raise
            return [cast(int, encoder.ends.chat)]
        return ended if response.finished else ended[:-1]

    def response_ids(self, group: Group, prompt_ids: Ids) -> list[Ids]:
        # Names of special tokens in a response are text, as the policy wrote it.
        texts = [response.text for response in group.responses]
        response_ids = self.continuation.ids(
            texts, prompt_ids[-1] if prompt_ids else BEGINNING, control=False
        )
        for ids, response in zip(response_ids, group.responses, strict=True):
            if response.finished or not ids:
                ids.append(self.closing(group.prompt))
        return response_ids

    def closing(self, prompt: Prompt) -> int:
        """The token with which the loader closes a response to this prompt: to messages, or to
        text.
        """
        if prompt.given:
            messages = not isinstance(json.loads(prompt.given)["prompt"], str)
        else:  # no text has special tokens, but for those that the tokenizer puts first
            messages = any(
                number in self.controls for number in prompt.ids[len(self.policys_first) :]
            )
        return cast(int, self.ends.chat if messages else self.ends.text)

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """The prompt's ids after the tokens that the tokenizer puts first, unless a chat template
        has put one there. Where a chat template wrote the prompt, all names of the policy's special
        tokens in it are tokens to the policy, in plain text none is. A name that only the other
        model has a token for is text.
        """
        decoded = cast(str, self.policy.decode(prompt.ids, clean_up_tokenization_spaces=False))
        tokens = sum(number in self.controls for number in prompt.ids)
        templated = self.names.search(prompt.text) and len(self.names.findall(decoded)) == tokens
        # Every second part is the name of a token that only the other model has.
        parts = self.foreign.split(prompt.text) if templated else ["", prompt.text]
        ids: Ids = []
        for place, part in enumerate(parts):
            last = ids[-1] if ids else BEGINNING
            ids += self.continuation.ids([part], last, control=place % 2 == 0)[0] if part else []
        first, rest = split_bos(ids, self.scorer.bos_token_id)
        return (first or self.first_ids) + rest


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The special tokens by id, without the one for an unknown character, which is text."""
    return {
        number: name
        for number, name in special_tokens(tokenizer).items()
        if number != tokenizer.unk_token_id
    }
