"""The code of the page on models of one's own runs as it stands, and gives the gradients of one
process.

As a program it runs the page's distributed blocks: torchrun --nproc_per_node 4
tests/kernels/test_own_model.py
"""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import SequenceParallel

from fastp3o_kernels import linear_logprobs, linear_p3o_loss, p3o_loss, response_tokens
from tests.fastp3o.together import together

PAGE = (Path(__file__).parents[2] / "kernels" / "README.md").read_text()
GROUPS = {
    "the root's": "",
    "its own": "fully_shard(model.lm_head)",
    "the norm's": "fully_shard([model.norm, model.lm_head])",
}
# Two processes add the gradients of two prompts in another order than one process does.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def block(title: str) -> str:
    """The code of a section."""
    section = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return code


def run(names: dict, title: str, code: str | None = None) -> dict[str, Tensor]:
    """Runs a section's code among names that it adds to -> the gradients of its model, whole."""
    exec(compile(block(title) if code is None else code, title, "exec"), names)
    return gradients(names["model"]) if "model" in names else {}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {
        name: grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in found.items()
    }


def padded() -> tuple[dict, dict[str, Tensor]]:
    """The names after the blocks that need one process, and the gradients of both prompts."""
    names: dict = {}
    run(names, "The one change")
    expected = run(names, "Padded batches")
    assert all(gradient.any() for gradient in expected.values())
    return names, expected


def test_padded_and_packed_batches_have_the_loss_of_logits():
    names, expected = padded()
    loss, model, ids, mask = (names[name] for name in ("loss", "model", "ids", "response_mask"))
    logprobs = model(ids)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    of_responses = (logprobs * mask[:, 1:]).sum(1).view(2, 2)
    by_logits = p3o_loss(of_responses, None, names["ref"], names["rewards"]).loss
    torch.testing.assert_close(loss, by_logits)
    from_logits = torch.autograd.grad(by_logits, list(model.parameters()))
    torch.testing.assert_close(dict(zip(expected, from_logits, strict=True)), expected, **CLOSE)
    run(names, "Packed rows")
    torch.testing.assert_close(names["packed_loss"], loss)
    torch.testing.assert_close(gradients(names["packed_model"]), expected, **CLOSE)


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_that_share_a_model_have_the_gradients_of_one(processes):
    done = together(Path(__file__), processes=processes)
    assert done.returncode == 0, done.stdout


def check_fsdp(names: dict, expected: dict[str, Tensor]) -> None:
    """The group of the head changes no bit; its weight alone is refused with what to do."""
    code, found = block("FSDP2"), []
    assert code.count(GROUPS["its own"]) == 1
    for line in GROUPS.values():
        found.append(run(names, "FSDP2", code.replace(GROUPS["its own"], line)))
        torch.testing.assert_close(found[-1], expected, **CLOSE)
        assert all(torch.equal(found[-1][name], gradient) for name, gradient in found[0].items())
    run(names, "FSDP2")
    ids, labels = names["ids"][:1, :-1], names["ids"][0, 1:]
    with pytest.raises(
        ValueError,
        match=r"pass the layer itself instead of its weight, or call the layer's unshard",
    ):
        names["model"](ids, lambda hidden, head: linear_logprobs(hidden[0], head.weight, labels))

    def after_unshard(hidden: Tensor, head: nn.Module) -> Tensor:
        head.unshard()
        return linear_logprobs(hidden[0], head.weight, labels)

    with torch.no_grad():
        assert names["model"](ids, after_unshard).isfinite().all()
        names["model"].lm_head.reshard()
        assert isinstance(names["model"].lm_head.weight, DTensor)


def check_frozen_body(names: dict, expected: dict[str, Tensor]) -> None:
    """Only the head trains: no gradient passes hidden states, and the head's is reduced all the
    same.
    """
    code = block("FSDP2")
    for line in GROUPS.values():
        frozen = f"model.requires_grad_(False)\nmodel.lm_head.requires_grad_(True)\n{line}"
        found = run(dict(names), "FSDP2", code.replace(GROUPS["its own"], frozen))
        assert found.keys() == {"lm_head.weight"}
        torch.testing.assert_close(found["lm_head.weight"], expected["lm_head.weight"], **CLOSE)


def check_uneven_prompts(names: dict) -> None:
    """Process 0 has both prompts and process 1 the second: with the page's divisor each prompt
    weighs the same.
    """

    def loss(prompts: slice, divisor: float):
        rows = slice(2 * prompts.start, 2 * prompts.stop)
        tokens = response_tokens(
            names["ids"][rows], names["response_mask"][rows], responses_per_prompt=2
        )
        states = names["ref"][prompts], names["rewards"][prompts]

        def p3o(hidden: Tensor, head: nn.Module) -> Tensor:
            batch = (
                hidden.flatten(0, 1)[tokens.predicted_at],
                head,
                tokens.labels,
                tokens.cu_seqlens,
            )
            return linear_p3o_loss(*batch, None, *states, divisor=divisor).loss

        return names["ids"][rows], p3o

    alone = names["Model"]()
    alone.load_state_dict(names["model"].state_dict())
    for prompts in (slice(0, 2), slice(1, 2)):
        alone(*loss(prompts, 3)).backward()
    sharded = dict(names)
    run(sharded, "FSDP2", block("FSDP2").partition("\nloss = ")[0])
    model = sharded["model"]
    model(*loss(slice(dist.get_rank(), 2), 3 / dist.get_world_size())).backward()
    torch.testing.assert_close(gradients(model), gradients(alone), **CLOSE)


def check_tensor_parallel(names: dict, expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(run(names, "Tensor parallelism"), expected, **CLOSE)
    with pytest.raises(
        ValueError, match=r"Head\(weight.to_local\(\), shard=VocabularyShard.of\(weight\)\)"
    ):
        names["model"](names["ids"], names["p3o_of"](slice(0, 2)))


def check_sequence_parallel(names: dict, expected: dict[str, Tensor]) -> None:
    """A norm that returns a part of the positions, and the line that the page says for it."""
    code = block("Tensor parallelism").replace(
        "PLAN = {\n", 'PLAN = {\n    "norm": SequenceParallel(),\n'
    )
    code = code.replace(
        "        weight = layer.weight\n", f"        {LINE}\n        weight = layer.weight\n"
    )
    assert code.count(LINE) == 1

    class Model(names["Model"]):
        def __init__(self) -> None:
            super().__init__()
            self.norm.register_forward_pre_hook(self.parted)

        @staticmethod
        def parted(_: nn.Module, inputs: tuple[Tensor]) -> DTensor:
            whole = DTensor.from_local(inputs[0], names["mesh"], [Replicate()])
            return whole.redistribute(placements=[Shard(1)])

    further = {"Model": Model, "SequenceParallel": SequenceParallel, "Replicate": Replicate}
    torch.testing.assert_close(run(names | further, "Tensor parallelism", code), expected, **CLOSE)


(LINE,) = re.findall(r"`(hidden = hidden\.redistribute.*?)`", PAGE)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    shared = padded()
    if dist.get_world_size() == 2:
        check_uneven_prompts(*shared[:1])
        check_fsdp(*shared)
        check_frozen_body(*shared)
    check_tensor_parallel(*shared)
    check_sequence_parallel(*shared)
    if dist.get_world_size() == 4:
        torch.testing.assert_close(
            run(shared[0], "FSDP2 and tensor parallelism"), shared[1], **CLOSE
        )
    dist.destroy_process_group()
