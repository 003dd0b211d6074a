"""What each rank does in the tests of this folder: a real vLLM engine and a real Megatron policy in
every process.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from r3.config import Config
from r3.data.prompts import prompts_of_step
from r3.engine import (
    Engine,
    EngineConfigError,
    EngineStateError,
    Sampling,
    WeightMismatch,
    sampling_seed,
)
from r3.engine.build import refuse_unfit
from r3.handover.memory import ResidencyError, State
from r3.handover.rollouts import PackingSpec, distribute
from r3.handover.weights import SyncError, export, prove_sync, prove_weights, sync_weights
from r3.metrics.mismatch import mismatch
from r3.rollout.collect import CollectedRollouts, Collector
from r3.rollout.scored import gather_rewards, score_all
from r3.rollout.single_turn import sample_single_turn
from r3.rollout.task import Task, read_task
from r3.routing.replay import Mode
from r3.run.build import build_run
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from r3.types import Rollout
from tests.tiny import tiny_config


class World:
    """Everything a step uses, built for one rank."""

    def __init__(self, device: Device, config: Config, *, hosts: list[str] | None = None) -> None:
        self.device, self.config = device, config
        self.task: Task = read_task(config)
        self.mesh: Mesh = build_mesh(device, config.parallel)
        run = build_run(config, self.task, device=device, mesh=self.mesh, hosts=hosts)
        self.engine, self.policy = run.engine, run.policy
        self.stream, self.residency = run.weights, run.residency

    def sync(self, policy_version: int) -> None:
        """Hand the memory over and the weights with it."""
        self.residency.move(State.SYNC)
        sync_weights(
            self.stream, self.engine, self.device, self.mesh, policy_version=policy_version
        )
        self.residency.move(State.GENERATE)

    def collect(
        self, policy_version: int, *, step: int = 0, engine: Engine | None = None
    ) -> CollectedRollouts:
        """Hold one round of conversations."""
        return one_round(
            engine or self.engine, self.task, self.mesh, self.config, policy_version, step=step
        )

    def perturb(self, seed: int = 0) -> None:
        """Move the policy's weights, the same way on every replica of a tensor."""
        for slot in self.policy.slots:
            digest = hashlib.blake2b(f"{seed}/{slot.name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            noise = torch.randn(slot.tensor.shape, generator=generator) * 0.01
            slot.tensor.add_(noise.to(slot.tensor.device))


def one_round(
    engine: Engine, task: Task, mesh: Mesh, config: Config, policy_version: int, *, step: int
) -> CollectedRollouts:
    """Hold one round of conversations about the prompts of a step."""
    rollout = config.rollout
    collector = Collector(
        engine=engine,
        mesh=mesh,
        setup=task.conversation_setup,
        scorer=task.scorer,
        sampling=Sampling(temperature=rollout.temperature),
        run_seed=0,
        samples_per_prompt=rollout.group_size,
        max_response_tokens=rollout.max_response_tokens,
    )
    prompts = prompts_of_step(task.prompts, seed=0, step=step, count=rollout.prompts_per_step)
    return collector.collect(prompts, policy_version=policy_version, seed_step=step)


def signature(rollouts: list[Rollout]) -> list[str]:
    """Everything the engine returned, bit for bit, order of experts inside a row aside."""
    return [
        f"{r.tokens_T.tolist()} {r.logprobs_T.tobytes().hex()} "
        f"{hashlib.sha256(r.routed_experts.tobytes()).hexdigest()}"
        for r in rollouts
    ]


def push_equals_fresh_engine(
    device: Device, *, ep: int, out: str, hosts: list[str] | None = None
) -> dict[str, Any]:
    """Push moved weights, and compare with an engine freshly loaded from the exported
    checkpoint.
    """
    world = World(device, tiny_config(parallel={"ep": ep}), hosts=hosts)
    world.sync(0)
    before = signature(world.collect(0).rollouts)
    world.residency.move(State.TRAIN)
    world.perturb()
    world.sync(1)
    pushed = signature(world.collect(1).rollouts)
    again = signature(world.collect(1).rollouts)  # now with every prompt in the prefix cache
    folder = Path(out) / "export"
    export(
        folder, world.stream, world.policy, device, world.mesh, like=world.config.model.path, step=1
    )
    config = replace(world.config, model=replace(world.config.model, path=str(folder)))
    fresh = Engine(
        config,
        device,
        world.task.shape,
        world.task.tokenizer,
        max_model_len=world.task.max_model_len,
        from_disk=True,
    )
    fresh.wake("weights")
    fresh.wake("kv_cache")
    fresh.policy_version, fresh._stale_cache = (
        1,
        False,
    )  # it was loaded from the files, not pushed to
    loaded = signature(world.collect(1, engine=fresh).rollouts)
    return {
        "moved": before != pushed,
        "equal": pushed == loaded,
        "cached_equal": again == loaded,
        "reads": [world.stream.local_reads, world.stream.peer_reads, world.stream.network_reads],
    }


def pushed(device: Device, *, out: str, dtype: str) -> dict[str, Any]:
    """Return what an engine samples before and after a push of moved weights; export these."""
    world = World(device, tiny_config(model={"dtype": dtype}, engine={"dtype": dtype}))
    world.sync(0)
    before = signature(world.collect(0).rollouts)
    world.residency.move(State.TRAIN)
    world.perturb()
    world.sync(1)
    compared = prove_weights(world.stream, world.engine, world.mesh)
    after = signature(world.collect(1).rollouts)
    cached = signature(world.collect(1).rollouts)
    like = world.config.model.path
    export(Path(out), world.stream, world.policy, device, world.mesh, like=like, step=1)
    return {"before": before, "after": after, "cached": cached, "compared": compared}


def loaded(device: Device, *, model: str, dtype: str) -> list[str]:
    """Return what an engine samples that loads a checkpoint itself.

    With sleep mode, vLLM allows one engine per process on GPUs.
    """
    config = tiny_config(model, model={"dtype": dtype}, engine={"dtype": dtype})
    task = read_task(config)
    mesh = build_mesh(device, config.parallel)
    engine = Engine(
        config,
        device,
        task.shape,
        task.tokenizer,
        max_model_len=task.max_model_len,
        from_disk=True,
    )
    engine.wake("weights")
    engine.wake("kv_cache")
    engine.policy_version, engine._stale_cache = 1, False  # loaded from the files, not pushed to
    return signature(one_round(engine, task, mesh, config, 1, step=0).rollouts)


def engine_guards(device: Device) -> dict[str, str]:
    """Provoke every refusal of the engine, then show that it still works."""
    world = World(device, tiny_config())
    engine, stream = world.engine, world.stream
    said: dict[str, str] = {}

    def provoke(name: str, action: Callable[[], Any]) -> None:
        try:
            action()
            said[name] = "nothing was raised"
        except (EngineStateError, WeightMismatch, ResidencyError, SyncError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    def sample(policy_version: int = 1) -> list[Rollout]:
        return sample_single_turn(
            engine,
            world.task.prompts.prompts[:1],
            seeds=[1],
            policy_version=policy_version,
            max_tokens=4,
        )

    def push(shapes: dict[str, Any] | None = None, skip: str = "") -> None:
        weights = ((name, tensor) for name, tensor in stream.read() if name != skip)
        engine.load_weights(
            shapes if shapes is not None else stream.shapes, weights, policy_version=1
        )

    gone = "model.layers.1.mlp.experts.3.up_proj.weight"
    provoke("push asleep", push)
    provoke("generate asleep", sample)
    provoke("cache first", lambda: engine.wake("kv_cache"))
    provoke("sleep twice", engine.sleep)
    provoke("train to generate", lambda: world.residency.move(State.GENERATE))
    world.residency.move(State.SYNC)
    provoke("wake twice", lambda: engine.wake("weights"))
    provoke("not announced", lambda: push({k: v for k, v in stream.shapes.items() if k != gone}))
    provoke("misshaped", lambda: push(stream.shapes | {gone: (3, 3)}))
    provoke("unknown", lambda: push(stream.shapes | {"model.layers.9.x": (3, 3)}))
    provoke("not delivered", lambda: push(skip=gone))
    provoke(
        "half pushed",
        lambda: (engine.wake("kv_cache"), sample()),
    )
    push()
    provoke("cache not reset", sample)
    engine.reset_cache()
    provoke("other version", lambda: sample(policy_version=2))
    world.residency.state = State.GENERATE
    provoke("generate to sync", lambda: world.residency.move(State.SYNC))
    prove_sync(engine, world.policy, world.task.prompts.prompts[:2], world.config, world.mesh)
    world.perturb()
    provoke(
        "stale",
        lambda: prove_sync(
            engine, world.policy, world.task.prompts.prompts[:2], world.config, world.mesh
        ),
    )
    said["works"] = str(sample()[0].num_response_tokens)
    return said | _unfit(engine.llm.llm_engine.vllm_config, world.config)


def _unfit(built: Any, config: Config) -> dict[str, str]:
    """What is said of the built engine's config with one fact changed, for each fact that r3 relies
    on.
    """
    said = {}
    for name, value in {
        "model_config.enable_return_routed_experts": False,
        "parallel_config.tensor_parallel_size": 2,
        "parallel_config.pipeline_parallel_size": 2,
        "parallel_config.decode_context_parallel_size": 2,
        "parallel_config.prefill_context_parallel_size": 2,
        "parallel_config.data_parallel_size": 2,
        "parallel_config.enable_eplb": True,
        "parallel_config.enable_dbo": True,
        "kv_transfer_config": "connector",
        "cache_config.kv_offloading_size": 1.0,
        "cache_config.cache_dtype": "fp8",
        "offload_config.uva.cpu_offload_gb": 1.0,
        "offload_config.prefetch.offload_group_size": 2,
        "lora_config": "adapter",
        "model_config.quantization": "fp8",
        "model_config.dtype": torch.float16,
        "model_config.logprobs_mode": "raw_logprobs",
        "quant_config": "fp8",
        "speculative_config": "draft",
    }.items():
        changed = owner = copy.copy(built)
        *path, last = name.split(".")
        for part in path:
            object.__setattr__(owner, part, copy.copy(getattr(owner, part)))
            owner = getattr(owner, part)
        object.__setattr__(owner, last, value)
        said[f"unfit {last}"] = _refusal(changed, config, capture=True)
    said["unfit other side"] = _refusal(built, config, capture=False)
    said["fit"] = _refusal(built, config, capture=True)
    return said


def _refusal(built: Any, config: Config, *, capture: bool) -> str:
    try:
        refuse_unfit(built, config, capture=capture)
    except EngineConfigError as error:
        return str(error)
    return "nothing was raised"


def step_routes(device: Device, *, ep: int, dtype: str = "float32") -> dict[str, Any]:
    """Generate, exchange, pack and train on real rollouts; read the routers back and measure the
    mismatch.

    `k3` has it with replayed and with live routes, of the same tokens.
    """
    config = tiny_config(
        parallel={"ep": ep},
        rollout={"prompts_per_step": 8},
        model={"dtype": dtype},
        engine={"dtype": dtype},
    )
    world = World(device, config)
    world.sync(0)
    proof = prove_sync(
        world.engine, world.policy, world.task.prompts.prompts[:4], config, world.mesh
    )
    answers = world.collect(0)
    world.residency.move(State.TRAIN)
    scored = score_all(answers, gather_rewards(answers, world.mesh.world, config), config)
    (batch,), _ = distribute(
        scored,
        world.mesh,
        world.task.shape,
        PackingSpec(micro_batch_tokens=700),
    )
    policy = world.policy
    used: dict[int, list[torch.Tensor]] = {layer: [] for layer in policy.shape.moe_layers}
    hooks = [
        layer.mlp.router.register_forward_hook(
            lambda _m, _i, out, number=layer.layer_number - 1: used[number].append(out[1].cpu())
        )
        for layer in policy.chunks[0].decoder.layers
    ]
    metrics = policy.forward_backward(batch)
    for hook in hooks:
        hook.remove()
    k3 = {}
    modes: tuple[Mode, ...] = ("replay", "live")
    for mode in modes:
        scores = policy.score(batch.micro_batches, mode=mode)
        columns = (scores.logprobs, scores.rollout_logprobs, scores.loss_mask)
        part = mismatch(*(torch.cat(column) for column in columns))["k3"]
        k3[mode] = type(part).reduce([part])
    slots = wrong = 0
    for i, micro_batch in enumerate(batch.micro_batches):
        captured = micro_batch.captured_N
        for position, layer in enumerate(policy.shape.moe_layers):
            rows = micro_batch.routed_experts_NLK[:, position].long()[captured]
            given = torch.zeros(len(rows), policy.shape.num_experts, dtype=torch.bool).scatter(
                1, rows, True
            )
            slots += len(rows)
            wrong += int((used[layer][i][captured] != given).any(-1).sum())
    return {
        "proof": proof,
        "slots": slots,
        "wrong": wrong,
        "k3": k3,
        "abs_max": metrics["mismatch/abs_max"].value,
    }


def sampled(device: Device, *, ep: int, **engine: Any) -> dict[str, str]:
    """(prompt, member) -> tokens of two steps, to compare over ranks and batch sizes."""
    world = World(device, tiny_config(parallel={"ep": ep}, engine=engine))
    world.sync(0)
    found = {}
    for step in (1, 2):
        for rollout in world.collect(0, step=step).rollouts:
            found[f"{step} {rollout.prompt_id} {rollout.sample_index}"] = str(
                rollout.tokens_T.tolist()
            )
    return found


def memory_moves(device: Device, *, dtype: str) -> dict[str, Any]:
    """How much memory leaves in each state, and whether training notices that its state was
    away.
    """
    config = tiny_config(engine={"kv_cache_gib": 0.5}, model={"dtype": dtype})
    world = World(device, config)
    policy = world.policy
    random_state = torch.get_rng_state()
    world.sync(0)
    generate_gib = device.used_gib()
    gradient_bytes = sum(
        buffer.untyped_storage().nbytes() for buffer in policy.memory.gradient_buffers()
    )
    answers = world.collect(0)
    neutral = torch.equal(random_state, torch.get_rng_state())
    world.residency.move(State.TRAIN)
    asleep_gib = device.used_gib()
    scored = score_all(answers, gather_rewards(answers, world.mesh.world, config), config)
    (batch,), _ = distribute(
        scored,
        world.mesh,
        world.task.shape,
        PackingSpec(micro_batch_tokens=512),
    )
    policy.update(batch, total_updates=4)
    kept = {key: tensor.clone() for key, tensor in policy.memory.optimizer_tensors()}
    world.sync(1)
    away = sum(tensor.untyped_storage().nbytes() for _, tensor in policy.memory.optimizer_tensors())
    world.residency.move(State.TRAIN)
    back = all(torch.equal(kept[key], tensor) for key, tensor in policy.memory.optimizer_tensors())
    return {
        "generate_gib": generate_gib,
        "asleep_gib": asleep_gib,
        "gradient_bytes_in_generate": gradient_bytes,
        "optimizer_bytes_in_generate": away,
        "optimizer_tensors": len(kept),
        "restored": back,
        "random_state_kept": neutral,
    }


__all__ = [
    "engine_guards",
    "memory_moves",
    "push_equals_fresh_engine",
    "sampled",
    "sampling_seed",
    "step_routes",
]
