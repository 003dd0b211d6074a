"""Low-rank adapters: W + scale * B A replaces W; only A and B are trained.

The policy computes with merged weights, round(W + scale * B A), which are the bytes that the engine
gets: nothing of a layer changes, and the engine samples from the very policy that is trained. The
base is in host memory, and the weights are merged anew from it after every update, so that nothing
drifts. A quantised base (`model.base`) is on the device instead, and W is what it dequantises to:
the weights of one decoder layer at a time are made, when a pass comes to it. In backward, the
gradient G of a merged weight becomes scale * B^T G for A and scale * G A^T for B, and is freed: the
base has no gradient buffer and no optimizer state.

A and B are float32, one pair per matrix of the checkpoint, sharded as that matrix is: where ranks
share its rows, B has this rank's rows; where they share its columns, A has this rank's columns.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from r3.config import Config
from r3.lora.peft import adapter_reader
from r3.lora.plan import BLOCK, quantised_tensors, ranks_of
from r3.models.shape import ModelShape
from r3.models.tensors import Kind, conversion_rules
from r3.policy.weight_slots import Slot, slots, views
from r3.runtime.mesh import Axis, Mesh
from r3.runtime.tensors import storage_of, to_host

_TYPES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}


@dataclass(frozen=True, kw_only=True)
class QuantisedWeight:
    """A weight in one byte per value, with a factor per block of 128 values (`model.base`).

    Blocks lie along the dimension that ranks do not share, so that every layout has the same ones.

    Attributes:
        values: [..., blocks, 128], one byte each; the last block of a row is padded with zeros.
        scales: [..., blocks, 1], float32.
        width: values per row, without padding.
        by_columns: rows here are columns of the weight.
    """

    values: torch.Tensor
    scales: torch.Tensor
    width: int
    by_columns: bool

    @classmethod
    def of(
        cls, weight: torch.Tensor, kind: Literal["int8", "fp8"], *, by_columns: bool
    ) -> QuantisedWeight:
        """Quantise [..., rows, columns]: the largest value of a block is the type's largest."""
        dtype, largest = _TYPES[kind]
        rows = weight.detach().mT if by_columns else weight.detach()
        width = rows.shape[-1]
        blocks = F.pad(rows.float(), (0, -width % BLOCK)).unflatten(-1, (-1, BLOCK))
        scales = blocks.abs().amax(-1, keepdim=True) / largest
        scales.masked_fill_(scales == 0, 1.0)
        blocks = blocks / scales
        return cls(
            values=(blocks.round() if kind == "int8" else blocks).to(dtype),
            scales=scales,
            width=width,
            by_columns=by_columns,
        )

    def read(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight, [..., rows, columns], rounded once from float32."""
        blocks = self.values.float().mul_(self.scales).to(dtype)
        rows = blocks.flatten(-2)[..., : self.width]
        return rows.mT if self.by_columns else rows


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The pair of one matrix of the checkpoint, or of that matrix of all experts of this rank.

    Attributes:
        name: of the matrix in the checkpoint; `{e}` stands for the expert's number.
        weight: Megatron's parameter, which has the merged matrix.
        part: number of the matrix in it: of q, k and v, or of gate and up.
        kind: how the parameter is sharded.
        axis: over which ranks.
        is_expert: the parameter is that of all experts of this rank.
        shape: the model's.
        a: [r, in], or [experts, r, in].
        b: [out, r], or [experts, out, r].
        scale: factor of the product.
    """

    name: str
    weight: nn.Parameter
    part: int
    kind: Kind
    axis: Axis
    is_expert: bool
    shape: ModelShape
    a: nn.Parameter
    b: nn.Parameter
    scale: float

    @property
    def shards(self) -> dict[str, int | None]:
        """Dimension, from the end, along which each factor is sharded; None = it is whole."""
        by_rows = self.kind not in ("replicated", "row")
        return {"a": -1 if self.kind == "row" else None, "b": -2 if by_rows else None}

    def view(self, like_weight: torch.Tensor) -> torch.Tensor:
        """The matrix inside the parameter, or inside a tensor of its shape."""
        if self.is_expert:
            return like_weight.chunk(2, 1)[self.part] if self.kind == "gated" else like_weight
        return views(self.kind, like_weight, self.shape)[self.part]

    def matrix(self, like_weight: torch.Tensor) -> torch.Tensor:
        """The same in the checkpoint's order of rows, float32: [out, in] or [experts, out, in]."""
        part = self.view(like_weight).float()
        return part if self.is_expert else part.flatten(0, -2)

    def merge(self, like_weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add scale * B A to the matrix in a tensor of the parameter's shape, rounded once."""
        merged = self.matrix(like_weight).add(b @ a, alpha=self.scale)
        into = self.view(like_weight)
        into.copy_(merged.view(into.shape))

    def add_gradient(self, of_weight: torch.Tensor) -> None:
        """Add to the gradients of A and B what follows from that of the merged matrix."""
        gradient = self.matrix(of_weight)
        self.a.main_grad.add_(self.b.mT @ gradient, alpha=self.scale)
        self.b.main_grad.add_(gradient @ self.a.mT, alpha=self.scale)


@dataclass(frozen=True, kw_only=True)
class Made:
    """A parameter that is made of its base and adapters.

    Attributes:
        weight: the parameter.
        base: on the host, or quantised on the device.
        adapters: its own.
        layer: number of the decoder layer whose passes make a quantised one; None: it stays.
    """

    weight: nn.Parameter
    base: torch.Tensor | QuantisedWeight
    adapters: Sequence[Adapter]
    layer: int | None


class Adapters(nn.Module):
    """All adapters of a model chunk; its child `lora`.

    Attributes:
        adapters: the pairs, those of one parameter next to each other.
        bases: every parameter that is made of a base.
    """

    def __init__(
        self,
        adapters: Sequence[Adapter],
        mesh: Mesh,
        base: Literal["dtype", "int8", "fp8"],
        quantised: Sequence[tuple[nn.Parameter, bool, Any]],
    ) -> None:
        """Register the factors as parameters.

        Args:
            adapters: the pairs.
            mesh: the layout of the ranks.
            base: `model.base`.
            quantised: parameters that it quantises, whether by columns, and their decoder layers.
        """
        super().__init__()
        self.adapters, self._mesh = adapters, mesh
        self._base, self._quantised = base, quantised
        self.bases: list[Made] = []
        # By the memory of their weights: those that a pass makes.
        self._in_layers: dict[int, Made] = {}
        # Decoder layer whose quantised weights are there now, made with the present factors.
        self._held: int | None = None
        # Factors that the run started with, where B was not 0; None: not kept. Whether these are
        # merged now.
        self._first: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._is_first = False
        for adapter in adapters:
            for letter in "ab":
                name = _key(adapter, letter).replace(".", "/")  # torch allows no dots in names
                self.register_parameter(name, getattr(adapter, letter))

    def start(self, *, keep: bool = False, reference: bool = False) -> None:
        """Keep the loaded weights as the base, and let backward reach the adapters.

        Data parallelism and optimizer must exist: they take every weight that has a gradient.

        Args:
            keep: keep all merged weights in memory. They are the same with a quantised base.
            reference: keep copies of the factors, for `merge(first=True)`.
        """
        quantised = {id(weight): (by, layer) for weight, by, layer in self._quantised}
        own = {key: list(group) for key, group in groupby(self.adapters, lambda x: id(x.weight))}
        weights = [weight for weight, _, _ in self._quantised]
        weights += [group[0].weight for key, group in own.items() if key not in quantised]
        for weight in weights:
            base: torch.Tensor | QuantisedWeight = weight
            by_columns, of_layer = quantised.get(id(weight), (False, None))
            layer = of_layer.layer_number if of_layer else None
            if self._base != "dtype" and of_layer:
                base = QuantisedWeight.of(weight, self._base, by_columns=by_columns)
                if keep:
                    base, layer = base.read(weight.dtype), None
                else:
                    weight.data.untyped_storage().resize_(0)
            if isinstance(base, torch.Tensor):
                base = to_host(base)
            if id(weight) in own:
                weight.requires_grad_()
                weight.register_post_accumulate_grad_hook(_projection(self, len(self.bases)))
            adapters = own.get(id(weight), [])
            self.bases.append(Made(weight=weight, base=base, adapters=adapters, layer=layer))
        self._in_layers = {storage_of(made.weight): made for made in self.bases if made.layer}
        for of_layer in {} if keep else dict.fromkeys(layer for *_, layer in self._quantised):
            of_layer.register_forward_pre_hook(self._before)
            of_layer.register_forward_hook(self._after)
        started = [adapter for adapter in self.adapters if adapter.b.any()]
        if reference or not started:
            self._first = {
                adapter.name: (adapter.a.detach().clone(), adapter.b.detach().clone())
                for adapter in started
            }
        if started or keep:
            self.merge()

    @torch.no_grad()
    def project(self, number: int, gradient: torch.Tensor) -> None:
        """Add to the gradients of the adapters what follows from that of a merged parameter."""
        for adapter in self.bases[number].adapters:
            adapter.add_gradient(gradient)

    @torch.no_grad()
    def merge(self, *, first: bool = False) -> None:
        """Make every parameter of its base and its adapters.

        Args:
            first: of the adapters that the run started with.
        """
        assert not first or self._first is not None, "no reference weights are kept"
        self._is_first = first
        self.release()
        for made in self.bases:
            if made.layer is None:
                self._make(made, made.weight.data)

    def release(self) -> None:
        """Free weights that were dequantised from the base; the next pass recomputes them."""
        for made in self._in_layers.values():
            if made.layer == self._held:
                made.weight.data.untyped_storage().resize_(0)
        self._held = None

    @torch.no_grad()
    def made(self, flat: torch.Tensor) -> torch.Tensor | None:
        """Return all values of a parameter, recomputed; None if it is always in memory.

        Args:
            flat: a tensor in the parameter's memory.
        """
        made = self._in_layers.get(storage_of(flat))
        if made is None:
            return None
        into = torch.empty_like(made.weight)
        self._make(made, into)
        return into.view(-1)

    def _make(self, made: Made, into: torch.Tensor) -> None:
        if isinstance(made.base, QuantisedWeight):
            into.copy_(made.base.read(into.dtype))
        else:
            into.copy_(made.base, non_blocking=True)
        for adapter in made.adapters:
            if not self._is_first:
                adapter.merge(into, adapter.a, adapter.b)
            elif self._first and adapter.name in self._first:
                adapter.merge(into, *self._first[adapter.name])

    @torch.no_grad()
    def _hold(self, layer: int) -> None:
        """Let the quantised weights of one decoder layer be there, and of no other.

        Autograd keeps parameters themselves, and so sees the values that they have in backward.
        """
        if layer == self._held:
            return
        self.release()
        for made in self._in_layers.values():
            if made.layer == layer:
                made.weight.data.untyped_storage().resize_(made.weight.nbytes)
                self._make(made, made.weight.data)
        self._held = layer

    def _before(self, layer: Any, _inputs: Any) -> None:
        self._hold(layer.layer_number)

    def _after(self, layer: Any, _inputs: Any, output: Any) -> None:
        """Let backward, which begins with the gradient of the output, find the weights."""
        hidden = output[0] if isinstance(output, tuple) else output
        # Not in the forward before a recomputation: the graph does not get its hooks, and a later
        # hook of the same tensor (r3/routing/replay.py has one) would be lost with them.
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(lambda _gradient: self._hold(layer.layer_number))

    def sharded_state(self) -> dict[str, Any]:
        """Return the chunk's state for a checkpoint: adapters, by names that no layout changes."""
        from megatron.core.dist_checkpointing.mapping import ShardedTensor

        mesh, state = self._mesh, {}
        for adapter in self.adapters:
            copies = mesh.expert_dp if adapter.is_expert else mesh.dp_cp
            for letter, dim in adapter.shards.items():
                key, tensor, axis = _key(adapter, letter), getattr(adapter, letter), adapter.axis
                offsets = [(0, mesh.ep.rank, mesh.ep.size)] if adapter.is_expert else []
                if dim is not None:
                    offsets.append((tensor.dim() + dim, axis.rank, axis.size))
                state[f"lora.{key.replace('.', '/')}"] = ShardedTensor.from_rank_offsets(
                    f"lora.{key}",
                    tensor,
                    *offsets,
                    replica_id=(0, axis.rank if dim is None else 0, copies.rank),
                    # A vocabulary is padded to equal parts of the ranks.
                    allow_shape_mismatch=adapter.kind == "column",
                )
        return state


def _projection(adapters: Adapters, number: int) -> Callable[[torch.Tensor], None]:
    """Return a hook of a merged parameter. It does not keep the adapters, which know the parameter,
    alive: Python's garbage collection does not see through hooks.
    """
    reference = weakref.ref(adapters)

    def project(weight: torch.Tensor) -> None:
        gradient, weight.grad = weight.grad, None
        adapters = reference()
        if adapters is not None and gradient is not None:
            adapters.project(number, gradient)

    return project


def attach(config: Config, chunk: Any, shape: ModelShape, mesh: Mesh) -> Adapters:
    """Freeze a model chunk and give it adapters as its child `lora`.

    They are those of `lora.start`, or have B = 0.

    Args:
        config: the sections `lora`, `model` and `train` are read.
        chunk: the chunk; its weights may be loaded later.
        shape: the model's.
        mesh: the layout of the ranks.
    """
    chunk.requires_grad_(False)
    parameters = {parameter.data_ptr(): parameter for parameter in chunk.parameters()}
    ranks = ranks_of(config, shape)
    start = adapter_reader(config.lora.start, config.lora) if config.lora.start else None
    # Experts of a rank are one parameter, which begins where its first slot does.
    adapted = [
        (slot, parameters[slot.tensor.data_ptr()])
        for slot in slots([chunk], shape, mesh)
        if slot.tensor.data_ptr() in parameters
    ]
    adapters = [
        _adapter(config, shape, mesh, slot, weight, part, ranks[name], start)
        for slot, weight in adapted
        for part, name in enumerate(slot.parts)
        if name in ranks
    ]
    layers = {id(weight): layer for layer in chunk.decoder.layers for weight in layer.parameters()}
    names = quantised_tensors(shape) if config.quantises_base else set()
    quantised = [
        (weight, slot.kind == "row", layers[id(weight)])
        for slot, weight in adapted
        if names.issuperset(slot.hf)
    ]
    chunk.lora = Adapters(adapters, mesh, config.model.base, quantised)
    if chunk.pre_process:
        # Recomputation by Megatron gives no gradient to a layer whose input needs none.
        chunk.embedding.register_forward_hook(_needs_gradient)
    return chunk.lora


def _needs_gradient(_module: Any, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output.requires_grad_() if torch.is_grad_enabled() else output


def adapters_of(chunks: Iterable[Any]) -> Iterator[Adapters]:
    """Yield the adapters of model chunks that have some."""
    yield from (chunk.lora for chunk in chunks if hasattr(chunk, "lora"))


def factors(adapters: Adapters) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield (name of the checkpoint's matrix, A, B); without shards: of a rank that has all."""
    for adapter in adapters.adapters:
        if not adapter.is_expert:
            yield adapter.name, adapter.a.detach(), adapter.b.detach()
            continue
        for expert, (a, b) in enumerate(zip(adapter.a.detach(), adapter.b.detach(), strict=True)):
            yield adapter.name.format(e=expert), a, b


def _key(adapter: Adapter, letter: str) -> str:
    return f"{adapter.name}.{letter}"


def _adapter(
    config: Config,
    shape: ModelShape,
    mesh: Mesh,
    slot: Slot,
    weight: nn.Parameter,
    part: int,
    rank: int,
    start: Any,
) -> Adapter:
    experts = slot.experts
    axis, names, name = mesh.tp, [slot.hf[part]], slot.hf[part]
    if experts:
        rule = conversion_rules(shape).expert[experts.part]
        axis, name = mesh.etp, f"model.layers.{experts.layer}.{tuple(rule.hf)[part]}"
        names = [name.format(e=experts.first + i) for i in range(len(weight))]
    width = shape.tensor_shapes[names[0]][1]
    if start:
        a, b = (torch.stack(x) for x in zip(*map(start, names), strict=True))
    else:
        a = torch.stack([_initial(name, config.train.seed, rank, width) for name in names])
        b = torch.zeros(len(names), shape.tensor_shapes[names[0]][0], rank)
    if slot.kind == "row":
        a = a.chunk(axis.size, -1)[axis.rank]
    elif slot.kind != "replicated":
        rows = -(-b.shape[1] // axis.size)
        b = F.pad(b, (0, 0, 0, rows * axis.size - b.shape[1])).chunk(axis.size, 1)[axis.rank]
    adapter = Adapter(
        name=name,
        weight=weight,
        part=part,
        kind=slot.kind,
        axis=axis,
        is_expert=experts is not None,
        shape=shape,
        a=nn.Parameter((a if experts else a[0]).clone().to(weight.device)),
        b=nn.Parameter((b if experts else b[0]).clone().to(weight.device)),
        scale=config.lora.scale(rank),
    )
    _mark(adapter)
    return adapter


def _initial(name: str, seed: int, rank: int, width: int) -> torch.Tensor:
    """A of a matrix, uniform in +-1 / sqrt(in); the same under every layout."""
    digest = sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return (torch.rand(rank, width, generator=generator) * 2 - 1) / width**0.5


def _mark(adapter: Adapter) -> None:
    """Tell Megatron how the ranks share the factors, by the attributes that its layers set."""
    weight, axis = adapter.weight, adapter.axis
    for letter, dim in adapter.shards.items():
        factor = getattr(adapter, letter)
        for name in ("allreduce", "is_router"):
            if hasattr(weight, name):
                setattr(factor, name, getattr(weight, name))
        # The gradient norm leaves out factors without this mark on tp ranks other than the first,
        # where experts that are whole are no copies.
        factor.tensor_model_parallel = dim is not None or (adapter.is_expert and axis.size == 1)
        # Its gradient is this rank's part of a sum over tp: rows of the matrix, or tokens.
        factor.sequence_parallel = (
            getattr(weight, "sequence_parallel", False)
            if adapter.kind == "replicated"
            else dim is None and axis.size > 1
        )
