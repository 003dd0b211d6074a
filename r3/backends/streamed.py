"""The step of an optimizer whose state is on the host: some parameters at a time are on the device.

The same kernels see the same values, so the updates are the same bit for bit. On CUDA a part comes
while the one before it is updated and goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from r3.runtime.tensors import SideStream, Stash

PART_VALUES = 1 << 25
"""Parameters of a part of a streamed optimizer: 384 MiB with three tensors each. Two parts are on
the device at a time."""


def step_in_parts(
    optimizer: Any,
    tensors: Callable[[], Iterable[tuple[torch.Tensor, str, torch.Tensor]]],
    *,
    stash: Stash,
    coming: SideStream,
    going: SideStream,
) -> None:
    """Let torch's AdamW inside one of Megatron's optimizers step through its parameters in parts.

    Args:
        optimizer: Megatron's.
        tensors: yields (parameter of AdamW, key, tensor) of its state now.
        stash: has the tensors.
        coming, going: streams for copies to and from the device.
    """
    adam = optimizer.optimizer
    step = adam.step
    # Each part copies its own, while it is on the device.
    optimizer._copy_main_params_to_model_params = lambda: None

    def own(part: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter, key, tensor in tensors():
            if id(parameter) in part:
                yield key, tensor

    def fetch(part: set[int]) -> None:
        with coming.after_current():
            for key, tensor in own(part):
                stash.get(key, tensor)

    def in_parts() -> None:
        groups, models = adam.param_groups, _model_parameters(optimizer)
        parts = list(parts_of([parameter for group in groups for parameter in group["params"]]))
        owners = [{id(parameter) for parameter in part} for part in parts]
        for i, (part, owner) in enumerate(zip(parts, owners, strict=True)):
            if i == 0:
                fetch(owner)
            coming.join()
            # Memory of the part before is free for the next one, on whatever stream it was made.
            going.finish()
            if i + 1 < len(parts):
                fetch(owners[i + 1])
            adam.param_groups = [
                {**group, "params": [one for one in group["params"] if id(one) in owner]}
                for group in groups
            ]
            step()
            adam.param_groups = groups
            for parameter in part:
                if id(parameter) in models:
                    models[id(parameter)].copy_(parameter)
            with going.after_current():
                for key, tensor in own(owner):  # the first step has made the moments
                    stash.put(key, tensor)
        going.join()

    adam.step = in_parts


def parts_of(parameters: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Split parameters into parts of about `PART_VALUES` values, at least one each.

    The largest come first. A part comes to the device while the one before it goes: where both are
    of one size, both directions of the host link are busy all the time.
    """
    part: list[torch.Tensor] = []
    for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
        if part and sum(one.numel() for one in part) + parameter.numel() > PART_VALUES:
            yield part
            part = []
        part.append(parameter)
    if part:
        yield part


def _model_parameters(optimizer: Any) -> dict[int, torch.Tensor]:
    """By id of a float32 main parameter: its shard of the half-precision parameter buffer."""
    parameters = {}
    for mains, models in zip(
        optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups, strict=True
    ):
        for main, model in zip(mains, models, strict=True):
            where = optimizer._get_model_param_range_map(model)["gbuf_world_in_bucket"]
            buffer, _, bucket = optimizer.model_param_gbuf_map[model]
            flat = optimizer.buffers[buffer].buckets[bucket].param_data.view(-1)
            parameters[id(main)] = flat[where.start : where.end]
    return parameters
