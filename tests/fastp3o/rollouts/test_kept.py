"""Turns whose keys and values are kept: the tokens and log-probabilities of rounds, which compute
all anew.
"""

from itertools import pairwise

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from fastp3o.calls.function import FunctionError
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.packing.pack import Packing
from fastp3o.rollouts import cache
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Group, Prompt, pack_groups
from fastp3o.rollouts.turns.environment import Environments
from fastp3o.rollouts.turns.kept import KeptEngine, KeptTurns
from fastp3o.rollouts.turns.sampler import TrajectorySampler
from tests.fastp3o.groups import flat
from tests.fastp3o.models.model_families import FAMILIES, VOCABULARY, random_model

K, TURN, LONGEST, ENDS = 3, 9, 160, [2, 5, 11]
# One token, more than a window, and lengths between.
PROMPTS = [
    Prompt(
        "",
        torch.randint(12, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)).tolist(),
        number,
    )
    for number, n in enumerate((1, 7, 3, 12, 2, 9))
]
OBSERVED = (0, 1, 5, 20, 100)  # tokens


class Numbers(PreTrainedTokenizerFast):
    """Texts are the numbers of tokens."""

    def __init__(self):
        super().__init__(
            tokenizer_object=Tokenizer(WordLevel({"<end>": 2}, unk_token="<end>")),
            eos_token="<end>",
        )

    def decode(self, ids, **_) -> str:
        return " ".join(map(str, ids))


class Ragged:
    """Trajectories end at different turns."""

    def reset(self, prompt): ...

    def step(self, text):
        return "x" * OBSERVED[sum(map(int, text.split())) % len(OBSERVED)], 1.0, len(text) % 7 == 0


def observe(text: str, last: int, given: str, room: int) -> list[int]:
    return [12 + (7 * place + last) % (VOCABULARY - 12) for place in range(len(text))]


def policy_of(family: str) -> PackedModel:
    model = random_model(family, max_position_embeddings=LONGEST + 40)
    model.generation_config.eos_token_id = ENDS
    return PackedModel(model)


def sampler(
    policy,
    *,
    kept: type[KeptTurns] | None = KeptTurns,
    make=Ragged,
    batch=6,
    memory=None,
    longest=LONGEST,
) -> TrajectorySampler:
    options, limits = (
        {"max_turns": 5, "longest": longest},
        {"max_response_tokens": TURN, "memory": memory},
    )
    first, further = (
        EngineSampler(policy, Numbers(), batch_size=n, **limits) for n in (batch, batch * K)
    )
    if kept is not None:
        turns = kept(first, further, longest)
        first, further, options["end"] = turns, turns.go_on, turns.end
    return TrajectorySampler(
        first, further, Numbers(), Environments("Ragged", make), observe, **options
    )


def assert_alike(mine: list[Group], rounds: list[Group]) -> None:
    for one, other in zip(flat(mine), flat(rounds), strict=True):
        assert (one.ids, one.turns, one.finished) == (other.ids, other.turns, other.finished)
        torch.testing.assert_close(
            torch.tensor(one.logprobs), torch.tensor(other.logprobs), atol=1e-5, rtol=1e-5
        )


class Static(KeptTurns):
    """Shapes as under a CUDA graph, and an engine that serves again."""

    def new_engine(self, room, end_ids):
        return KeptEngine(TURN, self.policy, self.shapes, room, end_ids, self.settings, static=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_kept_turns_are_those_of_rounds_and_their_log_probabilities_a_packed_rows(
    family, monkeypatch
):
    policy = policy_of(family)
    rounds = sampler(policy, kept=None)(PROMPTS, K, 7)
    kept = sampler(policy)(PROMPTS, K, 7)
    assert_alike(kept, rounds)
    precise = policy_of(family).double()
    for row in pack_groups(kept, Packing(tokens_per_row=10_000)):
        got = torch.tensor(
            [value for g in row.groups for r in kept[g].responses for value in r.logprobs]
        )
        torch.testing.assert_close(
            got.double(), labeled_logprobs(precise, row).detach(), atol=1e-5, rtol=1e-5
        )
    monkeypatch.setattr(KeptEngine, "tokens_per_row", 32)
    static = sampler(policy, kept=Static)
    for prompts in (PROMPTS, PROMPTS[1:4], PROMPTS[::-1]):
        assert_alike(
            static(prompts, K, 7),
            [next(g for g in rounds if g.prompt == prompt) for prompt in prompts],
        )


@pytest.mark.parametrize("kept", [KeptTurns, Static])
def test_trajectories_that_are_full_are_cut_as_in_rounds(kept):
    policy, full = policy_of("llama"), 0
    for longest in range(TURN, 20, 2):
        rounds = sampler(policy, kept=None, longest=longest)(PROMPTS, K, 7)
        assert_alike(sampler(policy, kept=kept, longest=longest)(PROMPTS, K, 7), rounds)
        assert all(
            response.turns[-1].end == len(response.ids) <= longest for response in flat(rounds)
        )
        full += sum(
            len(response.ids) == longest and len(response.turns) > 1 for response in flat(rounds)
        )
    assert full > 5


def test_trajectories_differ_in_what_matters():
    lengths, observed = set(), set()
    for family in FAMILIES:
        for response in flat(sampler(policy_of(family))(PROMPTS, K, 7)):
            lengths.add(len(response.turns))
            observed |= {b.start - a.end for a, b in pairwise(response.turns)}
    assert lengths == {1, 2, 3, 4, 5}
    assert observed == set(OBSERVED)


def test_each_token_is_computed_once(monkeypatch):
    computed, whole = [], PackedModel.hidden_states

    def counting(self, input_ids, *rest, **options):
        computed.append(input_ids.numel())
        return whole(self, input_ids, *rest, **options)

    monkeypatch.setattr(PackedModel, "hidden_states", counting)
    turns = sampler(policy_of("llama"))
    turns(PROMPTS[:1], 1, 0)  # tries the policy
    for seed in range(1, 9):
        computed.clear()
        ((prompt, (response,)),) = turns(PROMPTS[3:4], 1, seed)
        # The last token is no one's context.
        assert sum(computed) == len(prompt.ids) + len(response.ids) - 1


def test_what_does_not_fit_goes_in_rounds(monkeypatch):
    policy = policy_of("mistral")
    expected = sampler(policy, kept=None)(PROMPTS, K, 7)
    monkeypatch.setattr(KeptEngine, "go_on", lambda *_: 1 / 0)
    assert_alike(sampler(policy, batch=5)(PROMPTS, K, 7), expected)
    assert_alike(sampler(policy, memory=40_000)(PROMPTS, K, 7), expected)
    monkeypatch.setattr(cache, "MOST_SLOTS", 6 * K - 1)
    assert_alike(sampler(policy)(PROMPTS, K, 7), expected)


def test_no_keys_outlive_a_call_also_one_that_fails():
    class Raises(Ragged):
        def step(self, text):
            raise ValueError("lost")

    policy = policy_of("llama")
    turns = sampler(policy)
    turns(PROMPTS, K, 7)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.05)
    assert_alike(turns(PROMPTS, K, 7), sampler(policy, kept=None)(PROMPTS, K, 7))
    with pytest.raises(FunctionError, match="lost"):
        (failing := sampler(policy, make=Raises))(PROMPTS, K, 7)
    for one in (turns, failing):
        assert one.first.engine is None
        assert not one.first.cached
