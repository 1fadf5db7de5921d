"""Gradients of a head that FSDP2 (`fully_shard`) spreads over processes, where the loss is computed
outside of the model's forward call.

FSDP2 reduces gradients at the end of a backward pass that goes through a result of its root's
forward call. A loss outside of that call whose hidden states have no gradient (a frozen body), or
come from elsewhere (a head that is no part of that root), has no such result in it. Each process
would keep its own gradient, in a tensor that no optimizer has.
"""

import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastp3o_kernels.head.head import Head


def reduced(head: Head) -> Head:
    """The head, whose backward pass asks FSDP2 to reduce gradients at its end; the same head where
    FSDP2 does not hold its weights. Gradients are averaged over processes and sharded, as those of
    a loss within the forward call are, and `set_requires_gradient_sync` holds.
    """
    if "torch.distributed.fsdp" not in sys.modules or not torch.is_grad_enabled():
        return head
    return replace(head, weight=asking(head.weight), bias=asking(head.bias))


def asking(part: Any) -> Any:
    """The tensor, or a view of it whose backward pass asks FSDP2 to reduce gradients."""
    state = None if part is None or not part.requires_grad else holder(parameter_of(part))
    if state is None:
        return part

    def ask(_: Tensor) -> None:
        state._lazy_init()  # a head that is no part of another root becomes one
        state._register_root_post_backward_final_callback()

    view = part.view_as(part)
    view.register_hook(ask)
    return view


def parameter_of(tensor: Tensor) -> Tensor:
    """The parameter that casts, views and `to_local` have made the tensor of, or the tensor."""
    node = tensor.grad_fn
    while node is not None and not hasattr(node, "variable"):
        inputs = node.next_functions
        node = inputs[0][0] if len(inputs) == 1 else None
    return tensor if node is None else node.variable


def holder(parameter: Tensor) -> Any:
    """The state of `fully_shard` that has gathered the parameter, None if none has. torch has no
    public way from a parameter to it.
    """
    states = getattr(torch.distributed, "_composable_state", None)
    for reference in getattr(states, "_module_state_mapping", {}).values():
        state = reference()
        groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there is one
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            for held in [] if group is None else group.fsdp_params:
                if getattr(held, "_unsharded_param", None) is parameter:
                    return state
    return None
