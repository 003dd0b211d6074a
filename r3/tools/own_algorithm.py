"""Losses and advantages of users' files: call them, compare results with the contract."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from r3.algo.loss import LossInputs
from r3.config import AlgoConfig
from r3.user_code.algorithm import AlgorithmError
from r3.user_code.calls import own_copy
from r3.user_code.loading import functions_of_algorithm


def own_function(algo: AlgoConfig, role: str, *, checks: bool = True) -> Callable[..., Any]:
    """Load a user's loss or advantage.

    What it raises, and a result of another form than agreed, becomes an `AlgorithmError` that says
    where.
    """
    own, spec = functions_of_algorithm(algo)[role], algo.own_functions[role]
    file = str(Path(spec.rpartition(":")[0]).resolve())

    def call(*inputs: Any) -> Any:
        try:
            result = own.function(*map(_own_tensors, inputs), **own_copy(own.arguments))
        except torch.OutOfMemoryError:
            raise  # it has a message of its own
        except Exception as error:  # users' code may raise anything; the message names the line
            frames = traceback.extract_tb(error.__traceback__)
            own_frames = [frame for frame in frames if frame.filename == file]
            last = (own_frames or frames)[-1]
            raise AlgorithmError(
                f"algo.{role} {spec} raised {type(error).__name__}: {error}\n"
                f"  {last.filename}:{last.lineno} in {last.name}: {last.line}\n"
                f"  Test it without a run: python -m r3.check_loss {spec}"
                f"{' --advantage' if role == 'advantage' else ''}"
            ) from error
        if checks and (fault := FAULT_OF[role](result, inputs[0])):
            raise AlgorithmError(f"algo.{role} {spec}: {fault}")
        return result

    return call


def _own_tensors(value: Any) -> Any:
    """Copy the tensors that a user's function gets; gradients flow through the copies."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, LossInputs):
        return replace(
            value, **{each.name: _own_tensors(getattr(value, each.name)) for each in fields(value)}
        )
    return value


def loss_fault(result: Any, inputs: LossInputs) -> str:
    """Return what is wrong with the form of a loss function's result; "" if nothing is."""
    if not (isinstance(result, tuple) and len(result) == 2):
        return f"it returned {_kind(result)}. Return two tensors: (loss_N, clipped_N)"
    for name, tensor, dtype in zip(
        ("loss_N", "clipped_N"), result, (torch.float32, torch.bool), strict=True
    ):
        if not isinstance(tensor, Tensor):
            return f"{name} is {_kind(tensor)}. Return a tensor of {dtype}"
        if tensor.shape != inputs.logprobs_N.shape:
            return (
                f"{name} has shape {list(tensor.shape)}, and there are "
                f"{len(inputs.logprobs_N)} tokens. Return one value per token: R3 masks, adds and "
                "divides"
            )
        if tensor.dtype != dtype:
            return f"{name} is {tensor.dtype}. Return {dtype}"
    return ""


def advantage_fault(result: Any, rewards_R: Tensor) -> str:
    """Return what is wrong with an advantage function's result; "" if nothing is."""
    if not isinstance(result, Tensor):
        return f"it returned {_kind(result)}. Return a tensor with one advantage per rollout"
    if result.shape != rewards_R.shape or not result.is_floating_point():
        return (
            f"it returned {result.dtype} of shape {list(result.shape)} for {len(rewards_R)} "
            "rollouts. Return one floating-point number per rollout"
        )
    if not bool(torch.isfinite(result).all()):
        bad = int(torch.nonzero(~torch.isfinite(result))[0])
        return (
            f"the advantage of rollout {bad} is {float(result[bad])}, its reward "
            f"{float(rewards_R[bad])}. Groups may have one rollout or equal rewards: add an "
            "epsilon to what you divide by"
        )
    return ""


def _kind(value: Any) -> str:
    return f"{type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple) else "")


FAULT_OF: dict[str, Callable[[Any, Any], str]] = {"loss": loss_fault, "advantage": advantage_fault}
"""What is wrong with a result, given the function's first input."""
