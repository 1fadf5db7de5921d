"""Whether the engine gives a policy's own distribution: a look at a few short responses."""

from math import isfinite

import torch

from fastp3o.models.packable import PROMPTS, TOLERANCE, within_vocabulary
from fastp3o.models.packed_model import PackedModel, scored_logprobs
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.engine import Engine
from fastp3o.rollouts.room import LayerShape, Room
from fastp3o_kernels.decoding import response_keys

# Two responses share a slot, two a prompt.
ROOM = Room(prompts=2, prompt_tokens=3, responses_per_prompt=2, slots=3, response_tokens=5)


@torch.no_grad()
def reason_against(policy: PackedModel, shapes: dict[int, LayerShape]) -> str | None:
    """Why the engine must not sample from this policy, None where it may."""
    prompts = [within_vocabulary(policy.model, ids) for ids in PROMPTS]
    try:
        engine = Engine(policy, shapes, ROOM, end_ids=set(), graph=False)
        responses, logprobs = engine.run(prompts, response_keys(0, torch.arange(2), 2))
    except Exception as error:  # from anywhere in a model that does not hand the cache on
        return f"a trial failed with: {error}"
    (row,) = pack(prompts, responses, Packing(tokens_per_row=100))
    expected = scored_logprobs(policy, row.to(policy.model.device))
    got = torch.tensor([logprob for g in row.groups for response in logprobs[g] for logprob in response])
    difference = (got.to(expected) - expected).abs().mean().item()
    if not isfinite(difference) or difference > TOLERANCE[policy.model.dtype]:
        return f"its tokens have other log-probabilities than in a packed row (off by {difference:.2g} on average)"
    return None
