"""What pipeline stages exchange, without asking each other for shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table

from r3.runtime.mesh import Mesh

_Shapes = Iterator[tuple[int, int, int]]


class KnownShapes(P2PCommunicator):
    """Megatron's communicator between pipeline stages, without its exchange of shapes.

    Micro-batches differ in length. For this case Megatron's stages send the shape of each tensor
    ahead of it. The sender waits for its device, and the receiver twice: until the shape is there,
    and to read it. But all stages have the same micro-batches, and Megatron's schedule has a fixed
    order. So the shapes follow from the lengths.

    It serves one run of a schedule. Two checks on the host take the place of the exchange: all
    stages have micro-batches of the same lengths, and every tensor that a stage sends has the shape
    that its neighbour expects at this place.
    """

    def __init__(self, config: Any, mesh: Mesh, lengths: Sequence[int], *, num_chunks: int) -> None:
        """Derive the shapes in the order of the schedule. All stages must call; no device waits.

        Args:
            config: Megatron's config of the model.
            mesh: the layout of the ranks. It must have pipeline stages.
            lengths: packed tokens of each micro-batch that the schedule will run, fillers included.
            num_chunks: model chunks of each stage.

        Raises:
            AssertionError: on every stage, if the stages have micro-batches of other lengths.
        """
        assert mesh.pp.group is not None, "one stage has nobody to send to"
        super().__init__(mesh.pp.group, config)
        self._rank = mesh.world.rank
        of_stages = mesh.pp.all_gather_object(tuple(lengths))
        assert len(set(of_stages)) == 1, (
            f"rank {self._rank}: lengths of micro-batches differ between pipeline stages: "
            + "; ".join(f"stage {stage} has {shapes}" for stage, shapes in enumerate(of_stages))
        )
        parts = mesh.cp.size * mesh.tp.size  # with tensor parallelism sequences are parallel too
        shapes = [(length // parts, 1, config.hidden_size) for length in lengths]
        order = get_schedule_table(
            len(shapes), num_chunks, config.microbatch_group_size_per_vp_stage
        )
        every = [shapes[number] for number, _ in order]
        # The last stage and the first are neighbours too, for every chunk but the last: its outputs
        # are the model's. Backward passes go through the chunks in the other order, and so come to
        # the same micro-batches in the same order.
        around = [shapes[number] for number, chunk in order if chunk < num_chunks - 1]
        previous = around if mesh.pp.rank == 0 else every
        following = around if mesh.pp.rank == mesh.pp.size - 1 else every
        self._from_previous, self._to_previous = iter(previous), iter(previous)
        self._from_next, self._to_next = iter(following), iter(following)

    def _communicate_shapes(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[Sequence[int], Sequence[int]]:
        """Return the shapes that arrive next from the previous and from the next stage. Local.

        Raises:
            AssertionError: a tensor to send does not have the shape that the neighbour expects, or
                the schedule receives more tensors than were expected.
        """
        self._require(tensor_send_next, self._to_next, "next")
        self._require(tensor_send_prev, self._to_previous, "previous")
        nothing = (0, 0, 0)
        return (
            self._take(self._from_previous, "previous") if recv_prev else nothing,
            self._take(self._from_next, "next") if recv_next else nothing,
        )

    def _require(self, tensor: torch.Tensor | None, shapes: _Shapes, neighbour: str) -> None:
        if tensor is not None:
            expected = next(shapes, None)
            assert tuple(tensor.shape) == expected, (
                f"rank {self._rank} sends {tuple(tensor.shape)} to the {neighbour} pipeline stage, "
                f"which expects {expected}"
            )

    def _take(self, shapes: _Shapes, neighbour: str) -> tuple[int, int, int]:
        expected = next(shapes, None)
        assert expected is not None, (
            f"rank {self._rank} receives more tensors from the {neighbour} pipeline stage than its "
            "micro-batches give"
        )
        return expected
