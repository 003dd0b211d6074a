"""What the engine does with a family's weights, on every rank: real vLLM, real Megatron."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from r3.config import LoraConfig
from r3.engine import direct_weights
from r3.engine.weight_push import Pushed, push
from r3.lora import adapted_tensors
from r3.runtime.device import Device
from r3.sync import sync_weights
from r3.types import Rollout
from tests.engines import World, held_tensors, net_of, signature
from tests.errors import message_of
from tests.families import transformers_model
from tests.processor import PROCESSORS
from tests.tiny import tiny_config


def pushed_family(device: Device, *, model: str, out: str) -> SimpleNamespace:
    """Push changed weights, prove them, and compare with an engine that loads their export.

    Returns:
        pushed: the engine after a push, and one that loaded the same weights from files, see
            `World.push_changed`.
        gates: experts over all layers.
        reloaded: layers whose experts went through vLLM's reload, with the reason.
        why_reloaded: why weights other than experts did; empty if they were copied.
        reload_equal: weights that go through the reload sample the same.
        fallen, fallen_note: layers whose experts went through the reload while R3 knew no kernel of
            experts, with the reason, and the note about it.
        fallen_equal: the engine sampled the same then.
        notes: lines that two weight syncs printed.
        faults: message of the proof by planted fault.
        routes, wrong_routes: rows of captured routes, one per token and MoE layer, and those whose
            experts are not the ones that transformers' routers choose with the same weights.
        proofs: largest log-probability differences of the proofs.
        some: of a sync of the tensors with adapters.
    """
    world = World(device, tiny_config(model))
    printed, folder, shape = io.StringIO(), Path(out) / "export", world.task.shape
    with redirect_stdout(printed):
        world.sync(0)
    found = SimpleNamespace(proofs=[world.proof()])
    with redirect_stdout(printed):
        found.pushed, rollouts = world.push_changed(folder)
    found.notes = printed.getvalue().splitlines()
    found.proofs.append(world.proof())
    found.routes, found.wrong_routes = compare_routes(rollouts, folder)
    found.gates = shape.num_experts * len(shape.moe_layers)
    found.reloaded, found.why_reloaded = world.engine.reloaded_experts, world.engine.why_reloaded

    def samples_the_same(push: Pushed) -> bool:
        world.engine.reset_cache()
        again = signature(world.collect(1).rollouts)
        return again == found.pushed.sampled and not push.unloaded

    by_reload = push(world.engine.llm, world.stream.read_blocks(), shape, copy=False)
    found.reload_equal = samples_the_same(by_reload)
    fallen = unknown_kernels(world)
    found.fallen_equal, found.fallen_note = samples_the_same(fallen), fallen.note
    found.fallen = {str(layer): why for layer, why in fallen.reloaded.items()}
    found.faults, found.some = planted_faults(world), some_tensors(world)
    return found


def some_tensors(world: World) -> SimpleNamespace:
    """Change matrices of attention, sync and prove; then change a norm as well.

    Returns:
        A sync of an engine that needs the tensors with adapters alone.
        sent, changed, all: bytes that were sent, of these tensors, and of the model.
        stale: message of the proof after another tensor changed too; NOTHING if it was sent.
    """
    engine, stream, policy = world.engine, world.stream, world.policy
    adapted = adapted_tensors(policy.shape, LoraConfig(rank=1, targets=("attention",)))
    stream.changing = set(adapted)

    def sync(suffix: str) -> None:
        for slot in policy.slots:
            if not stream.changing.isdisjoint(slot.hf) or slot.name.endswith(suffix):
                slot.tensor.mul_(1.001)
        sync_weights(stream, engine, world.device, world.mesh, policy_version=1)

    sizes = {name: 4 * math.prod(size) for name, size in policy.shape.tensor_shapes.items()}
    sent = sum(tensor.nbytes for _, tensor in stream.read_blocks(engine.needed(stream.changing)))
    sync("nothing")
    world.prove_weights()
    sync("final_layernorm.weight")
    return SimpleNamespace(
        sent=sent,
        changed=sum(sizes[name] for name in adapted),
        all=sum(sizes.values()),
        stale=world.proof_of_weights(),
    )


@torch.no_grad()
def compare_routes(rollouts: Sequence[Rollout], folder: Path) -> tuple[int, int]:
    """Count rows of captured routes, and those that are not what transformers' routers choose."""
    model = transformers_model(folder).eval()
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(
                lambda _module, _inputs, output: chosen.extend(
                    each for each in output if not each.is_floating_point()
                )
            )
    rows = wrong = 0
    for rollout in rollouts:
        chosen.clear()
        model(torch.from_numpy(rollout.tokens_T)[None], use_cache=False)
        captured = torch.from_numpy(rollout.routed_experts).long().sort(-1).values.unbind(1)
        for theirs, ours in zip(chosen, captured, strict=True):
            differs = (theirs[:-1].sort(-1).values != ours).any(-1)
            rows, wrong = rows + len(differs), wrong + int(differs.sum())
    return rows, wrong


def unknown_kernels(world: World) -> Pushed:
    """Push the weights while R3 knows none of vLLM's expert kernels."""
    known, direct_weights._PLAIN_KERNELS = direct_weights._PLAIN_KERNELS, ()
    try:
        return push(world.engine.llm, world.stream.read_blocks(), world.task.shape)
    finally:
        direct_weights._PLAIN_KERNELS = known


def planted_faults(world: World) -> dict[str, str]:
    """Return the message of the proof of weights by planted fault."""
    messages: dict[str, str] = {}

    def provoke(name: str, plant: Callable[[Any], None]) -> None:
        world.engine.llm.collective_rpc(lambda worker: plant(worker.model_runner.get_model()))
        messages[name] = world.proof_of_weights()
        world.engine.load_weights(world.stream, policy_version=1)

    def exchange(model: Any) -> None:
        (stacked,) = (
            module
            for name, module in model.named_modules()
            if ".1." in name and type(module).__name__ == "RoutedExperts"
        )
        stacked.w2_weight.data[[0, 3]] = stacked.w2_weight.data[[3, 0]].clone()

    if 1 in world.policy.shape.moe_layers:
        provoke("two experts", exchange)
    # The kernels read the head from its own packed copy: the embedding alone is not enough.
    if world.policy.shape.tied:
        provoke("embedding", lambda model: model.model.embed_tokens.weight.data[5].zero_())
    world.prove_weights()
    return messages


def other_processor(device: Device, *, model: str, out: str, processor: str) -> SimpleNamespace:
    """Push weights twice into an engine that packs them for a processor, once by the reload.

    Returns:
        An engine whose layers vLLM packs as it does on another processor.
        packed: convolutions that the engine has in another shape than the checkpoint, and how
            experts are packed.
        pushed: the engine after a push, and one that loaded the same weights from files.
        reload_equal: a push through vLLM's reload, whose weights were compared too, samples the
            same.
        proof: largest log-probability difference of engine and policy, routes replayed.
        stale: message of the proof by kind of layer, after one number of its weight changed.
        raw: message of the proof after the checkpoint's numbers were copied into a packed
            convolution as they are; empty if there is none.
        unknown: message of a push after a parameter got a shape that vLLM did not make.
    """
    PROCESSORS[processor]()
    half = {"dtype": "bfloat16"}
    config = tiny_config(model, model=half, engine=half)
    world = World(device, config)
    engine, found = world.engine, SimpleNamespace(packed=[], stale={}, raw="")
    world.sync(0)
    found.pushed, _ = world.push_changed(Path(out) / "export")
    found.proof = world.proof()
    push(engine.llm, world.stream.read_blocks(), world.task.shape, copy=False)
    world.prove_weights()
    engine.reset_cache()
    found.reload_equal = signature(world.collect(1).rollouts) == found.pushed.sampled
    modules = dict(net_of(engine).named_modules())

    def reload() -> None:
        engine.load_weights(world.stream, policy_version=1)

    tensors = dict(world.stream.read())
    for kind in ("o_proj", "mlp.gate", "conv1d"):
        name = next((f"{n}.weight" for n in modules if n.endswith(kind)), "")
        if not name:
            continue
        module, wrong = modules[name.removesuffix(".weight")], tensors[name].bfloat16().clone()
        wrong.view(-1)[5] += 1
        module.weight.data = wrong
        module.quant_method.process_weights_after_loading(module)
        found.stale[name] = world.proof_of_weights()
        reload()
    for name, module in modules.items():
        if name.endswith("conv1d") and module.weight.dim() == 2:
            found.packed.append(name)
            kept = module.weight.data.clone()
            module.weight.data.copy_(tensors[f"{name}.weight"][:, 0])
            found.raw = found.raw or world.proof_of_weights()
            module.weight.data.copy_(kept)
        if type(module).__name__ == "RoutedExperts":
            found.packed.append(module.quant_method.moe_kernel.fused_experts.isa)
    norm = modules["model.layers.1.input_layernorm"].weight
    norm.data = norm.data[None]
    values = held_tensors(engine)
    found.unknown = message_of(reload, RuntimeError)
    assert held_tensors(engine) == values, "nothing was copied"
    return found
