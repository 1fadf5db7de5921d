"""The reverse KL to a teacher in its context: loss and gradients, the sampled estimate, and runs
that learn.
"""

from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import InContext, SecondModel
from fastp3o.objectives.config.distillation import DistillationConfig
from fastp3o.packing.pack import Packing
from fastp3o.rollouts.groups import Group, Response, Turn
from fastp3o.run import log
from fastp3o.run.names import ROLLOUTS
from fastp3o.runtime.shares import Share
from fastp3o.training.loop import train
from fastp3o.training.microbatches import (
    equal_passes,
    make_microbatches,
    pack_minibatches,
    policy_logprobs,
)
from tests.fastp3o.groups import groups_of_ids
from tests.fastp3o.models.model_families import enlarge, random_model
from tests.fastp3o.objectives.test_runs import train_and_resume
from tests.fastp3o.runs import config, metrics

BOS, CPU = 1, torch.device("cpu")
RUN = {
    "inner_epochs": 1,
    "prompts_per_minibatch": 0,
    "reward": "",
    "responses_per_prompt": 4,
    "updates": 2,
}


def models(**changes) -> tuple[PackedModel, PreTrainedModel, PreTrainedModel]:
    """A policy, the same for transformers, and a teacher, in fp64."""
    policy, student, teacher = (random_model("llama", **changes).double() for _ in range(3))
    enlarge(teacher)
    return PackedModel(policy), student, teacher


def minibatch(
    kl: str, policy, teacher, context: list[int], groups: list[Group], packing: Packing, mask=None
):
    """The objective and its passes over all groups."""
    objective = DistillationConfig(model="m", output_dir="o", prompts="p", kl=kl).build()
    reference = SecondModel(PackedModel(deepcopy(teacher)), CPU, offload=False)
    reference = InContext(reference, context, BOS, packing) if context else reference
    objective.reference_values = reference.map_rows
    accelerator, rewards = Accelerator(cpu=True), torch.zeros(len(groups), len(groups[0].responses))
    rows, old = pack_minibatches(Share(), groups, 1, packing), partial(policy_logprobs, policy)
    made = make_microbatches(accelerator, old, reference, rows, rewards, mask)
    return objective, equal_passes(accelerator, made, mask, objective)[0]


def kls_and_logprobs(
    student, teacher, prompt: list[int], context: list[int], ids: list[int]
) -> tuple[Tensor, ...]:
    """Of each token of a response, [n]: its dense KL, and its log-prob by student and teacher."""
    first = int(prompt[0] == BOS)
    each, at = (
        ((student, prompt), (teacher, [*prompt[:first], *context, *prompt[first:]])),
        torch.tensor(ids)[:, None],
    )
    s, t = (
        model(torch.tensor([x + ids])).logits[0, len(x) - 1 : -1].log_softmax(-1)
        for model, x in each
    )
    kls = kl_div(t.detach(), s, reduction="none", log_target=True).sum(1)
    return kls, s.gather(1, at)[:, 0], t.gather(1, at)[:, 0].detach()


def gradients(loss: Tensor, model: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


def assert_close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    """Up to the rounding of norms and rotary positions, which transformers computes in fp32."""
    largest = max(gradient.norm() for gradient in expected)
    for mine, gradient in zip(got, expected, strict=True):
        assert (mine - gradient).norm() <= 1e-6 * (gradient.norm() + largest)


@pytest.mark.parametrize("packing", [Packing(30, True), Packing(1000, True), Packing(1000, False)])
@pytest.mark.parametrize("context", [[], [40, 41, 42, 43, 44]])
@pytest.mark.parametrize(
    "mask", [None, torch.tensor([[True, True], [False, True], [True, False], [True, True]])]
)
def test_the_exact_loss_and_its_gradients_are_those_of_dense_kls(packing, context, mask):
    """Ragged groups, which the teacher's longer rows hold in another order; with and without a
    first token `bos`.
    """
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(3, 40, (length,), generator=generator).tolist()

    prompts = [[BOS, *ids(2)], ids(9), ids(1), [BOS, *ids(5)]]
    groups = groups_of_ids(
        prompts, [[ids(n) for n in lengths] for lengths in ((7, 1), (2, 5), (12, 3), (4, 4))]
    )
    # with an observation
    groups[1].responses[1] = Response(ids(6), "", True, turns=(Turn(0, 2), Turn(4, 6)))
    policy, student, teacher = models()
    kls, of_teacher = [], [[] for _ in groups]
    for p, k in product(range(4), range(2)):
        prompt, response = groups[p].prompt.ids, groups[p].responses[k]
        kl, _, logprobs = kls_and_logprobs(student, teacher, prompt, context, response.ids)
        of_teacher[p] += [logprobs[slice(*span)] for span in response.spans]
        kls += [kl[slice(*span)] for span in response.spans if mask is None or mask[p, k]]
    expected = torch.cat(kls)
    objective, (rows, divisor) = minibatch("exact", policy, teacher, context, groups, packing, mask)
    parts = [objective.loss(policy, one, divisor) for one, _ in rows]
    loss = sum(loss for loss, _ in parts)
    torch.testing.assert_close(loss, expected.mean(), rtol=1e-6, atol=0.0)
    kl, count = sum(values["teacher_kl"] for _, values in parts).tolist()
    assert (kl, count) == pytest.approx((expected.sum().item(), len(expected)))
    assert_close(gradients(loss, policy.model), gradients(expected.mean(), student))
    for one, _ in rows:  # the sampled estimate takes the log-probs of the same tokens
        same = torch.cat([part for p in one.row.groups for part in of_teacher[p]])
        torch.testing.assert_close(one.ref_token_logprobs, same, rtol=1e-6, atol=1e-6)


def test_the_sampled_gradient_is_on_average_the_exact_one_and_not_that_of_whole_responses():
    """Over all responses of two tokens. Whole responses add what a first token does to the second
    one's KL.
    """
    prompt, context, held, whole, means = [3, 4], [4, 3, 3], 0.0, 0.0, {}
    policy, student, teacher = models(vocab_size=5)
    for response in map(list, product(range(5), repeat=2)):
        kls, logprobs, _ = kls_and_logprobs(student, teacher, prompt, context, response)
        held, whole = (
            held + logprobs.sum().detach().exp() * kls.sum(),
            whole + logprobs.sum().exp() * kls.sum(),
        )
        for kl in ("exact", "sampled"):
            groups = groups_of_ids([prompt], [[response]])
            objective, (((one, _),), _) = minibatch(
                kl, policy, teacher, context, groups, Packing(99)
            )
            means[kl] = (
                means.get(kl, 0.0)
                + one.old_logprobs.exp().squeeze() * objective.loss(policy, one, 1.0)[0]
            )
    target, of_whole = gradients(held, student), gradients(whole, student)
    for mean in means.values():
        assert_close(gradients(mean, policy.model), target)
    assert (
        max((other - own).norm() / own.norm() for other, own in zip(of_whole, target, strict=True))
        > 0.1
    )


@pytest.fixture
def outspoken(tiny_model, workplace) -> str:
    """The tiny model with weights so large that a context makes a difference."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for parameter in model.parameters():
        parameter.data *= 8 if parameter.dim() > 1 else 1
    for part in (model, AutoTokenizer.from_pretrained(tiny_model)):
        part.save_pretrained("outspoken")
    return "outspoken"


def test_a_teacher_without_context_is_the_start_and_moves_nothing(outspoken):
    train(config(outspoken, "run", DistillationConfig, **RUN))
    assert [(m["teacher_kl"], m["kl"], m["reward"], m["grad_norm"]) for m in metrics("run")] == [
        (0, 0, 0, 0)
    ] * 2


@pytest.mark.parametrize("kl", ["exact", "sampled"])
def test_a_student_learns_what_a_context_makes_the_teacher_do_and_resumes(outspoken, kl):
    """Without a reward, minus the KL is logged. Evaluations are of the teacher in its context, too."""
    evaluated = {"eval_prompts": "prompts.jsonl", "eval_responses_per_prompt": 16}
    settings = (
        RUN
        | evaluated
        | {"kl": kl, "teacher_context": "Be brief. ", "updates": 16, "save_every": 10}
    )
    steps = train_and_resume(outspoken, "run", DistillationConfig, **settings)
    before, after = (evaluation["kl"] for evaluation in metrics("run", "eval.jsonl"))
    assert 0 < after < 0.5 * before
    assert all(step["reward"] == pytest.approx(-step["kl"], rel=1e-4, abs=1e-5) for step in steps)
    logged = [one for group in log.read(Path("run", ROLLOUTS)) for one in group["responses"]]
    assert all(one["reward"] == -one["log_ratio"] for one in logged)


def test_what_does_not_fit_is_refused(outspoken):
    for changes, message in (
        ({"kl": "sampled", "top_k": 5}, "--kl sampled needs samples of the policy: no --top_k"),
        (
            {"length_penalty": 0.1},
            "--length_penalty has no effect without another objective: distillation reads",
        ),
        ({"sampler_ratio_cap": 2.0}, "--sampler_ratio_cap has no effect without another objective"),
        ({"teacher_context": "  "}, "--teacher_context must not be empty"),
        (
            {"teacher_context": "<end>" * 2000},
            "a context of 2000 tokens, prompt and response take up to 2518 tokens",
        ),
    ):
        with pytest.raises(UserError, match=message):
            train(config(outspoken, "refused", DistillationConfig, **RUN, **changes))
        assert not Path("refused").exists()
    train(config(outspoken, "run", DistillationConfig, **RUN, teacher_context="a"))
    with pytest.raises(UserError, match="teacher_context"):
        train(config(outspoken, "run", DistillationConfig, **RUN, teacher_context="b", resume=True))
