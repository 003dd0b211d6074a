"""A real vLLM engine and a real Megatron policy on every rank, and what the engine samples."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from r3.algo.advantage import advantages_of
from r3.algo.packing import with_advantages
from r3.config import Config
from r3.engine import Engine, Sampling
from r3.rollout import Collector, RoundResult, Task, gather_rewards, read_task
from r3.run import build_run
from r3.runtime.device import Device
from r3.runtime.mesh import Mesh, build_mesh
from r3.sync import PackingSpec, State, SyncError, distribute, sync_weights
from r3.tools import prove_sync, prove_weights
from r3.types import Batch, Rollout
from r3.user_code import advantage_of
from tests.errors import message_of
from tests.policies import export_policy
from tests.tiny import prompts_of_step


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
        """Give the engine the policy's weights and the memory."""
        self.residency.move(State.SYNC)
        sync_weights(
            self.stream, self.engine, self.device, self.mesh, policy_version=policy_version
        )
        self.residency.move(State.GENERATE)

    def collect(
        self, policy_version: int, *, step: int = 0, engine: Engine | None = None
    ) -> RoundResult:
        """Sample one round of conversations."""
        return one_round(
            engine or self.engine, self.task, self.mesh, self.config, policy_version, step=step
        )

    def push_changed(self, folder: Path) -> tuple[SimpleNamespace, list[Rollout]]:
        """Change the policy's weights, push them, and let an engine load their export.

        Returns:
            A push of version 1, against an engine that loaded the same weights from files, and
            what the pushed engine sampled.
            sampled: signature of that.
            moved: the push changed what is sampled.
            compared: tensors of which every byte was found equal in the engine; gate and up of an
                expert count as one.
            tensors: tensors of the model.
            equal: both engines sample the same.
            tensors_equal: both have the same parameters and buffers, bit for bit.
        """
        before = signature(self.collect(0).rollouts)
        self.residency.move(State.TRAIN)
        self.perturb()
        self.sync(1)
        compared = self.prove_weights()
        rollouts = self.collect(1).rollouts
        sampled = signature(rollouts)
        export_policy(folder, self.stream, self.policy)
        config = replace(self.config, model=replace(self.config.model, path=str(folder)))
        fresh = engine_from_disk(config, self.device, self.task, policy_version=1)
        pushed = SimpleNamespace(
            sampled=sampled,
            moved=before != sampled,
            compared=compared,
            tensors=len(self.stream.shapes),
            equal=sampled == signature(self.collect(1, engine=fresh).rollouts),
            tensors_equal=held_tensors(self.engine) == held_tensors(fresh),
        )
        return pushed, rollouts

    def batch_of(self, collected: RoundResult, micro_batch_tokens: int) -> Batch:
        """Pack rollouts with their advantages, as a step with one update does."""
        rewards = gather_rewards(collected.samples, self.mesh.world, self.config)
        spec = PackingSpec(micro_batch_tokens=micro_batch_tokens, captured=self.engine.capture)
        (batch,), _ = distribute(collected.samples, self.mesh, self.task.shape, spec)
        return with_advantages(batch, advantages_of(rewards, advantage_of(self.config.algo)))

    def proof(self) -> float:
        """Largest log-probability difference of the proof of a sync; raises what it raises."""
        prompts = self.task.prompts.prompts[:4]
        return prove_sync(self.engine, self.policy, prompts, self.config, self.mesh)

    def prove_weights(self) -> int:
        """Tensors of which the proof has compared every byte; raises what it raises."""
        return prove_weights(self.stream, self.engine, self.mesh)

    def proof_of_weights(self) -> str:
        """What that proof says, or `NOTHING`."""
        return message_of(self.prove_weights, SyncError)

    def perturb(self, seed: int = 0) -> None:
        """Change the policy's weights, the same way on every replica of a tensor."""
        for slot in self.policy.slots:
            # With tied embeddings, the last pipeline stage's output layer is the embedding too.
            tied = slot.name == "output_layer.weight" and self.task.shape.tied
            name = "embedding.word_embeddings.weight" if tied else slot.name
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            noise = torch.randn(slot.tensor.shape, generator=generator) * 0.01
            slot.tensor.add_(noise.to(slot.tensor.device))


def require_equal(pushed: SimpleNamespace) -> None:
    """Require that an engine after `World.push_changed` is the one that loaded the export."""
    assert pushed.moved, "the moved weights must sample something else, or the test shows nothing"
    assert pushed.equal, "both sample the same"
    assert pushed.tensors_equal, "an engine that began with random weights and a loaded one"
    assert pushed.tensors == pushed.compared, "every tensor was compared"


def one_round(
    engine: Engine, task: Task, mesh: Mesh, config: Config, policy_version: int, *, step: int
) -> RoundResult:
    """Sample one round of conversations about the prompts of a step."""
    rollout = config.rollout
    collector = Collector(
        engine=engine,
        mesh=mesh,
        setup=task.conversation_setup,
        scorer=task.scorer,
        sampling=Sampling(
            temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k
        ),
        run_seed=0,
        samples_per_prompt=rollout.group_size,
        max_response_tokens=rollout.max_response_tokens,
    )
    prompts = prompts_of_step(task.prompts, seed=0, step=step, count=rollout.prompts_per_step)
    return collector.collect(prompts, policy_version=policy_version, seed_step=step)


def engine_from_disk(
    config: Config, device: Device, task: Task, *, policy_version: int = 0
) -> Engine:
    """An awake engine that loaded `config.model.path` itself, as if that were `policy_version`.

    With sleep mode, vLLM allows one engine per process on GPUs.
    """
    shape = replace(task.shape, source=config.model.path)
    engine = Engine(
        config, device, shape, task.tokenizer, max_model_len=task.max_model_len, from_disk=True
    )
    engine.wake("weights")
    engine.wake("kv_cache")
    engine.policy_version, engine._stale_cache = policy_version, False
    return engine


def signature(rollouts: list[Rollout]) -> list[str]:
    """Return tokens, log-probabilities and routes of each rollout, as text equal bit for bit."""
    return [
        f"{r.tokens_T.tolist()} {r.logprobs_T.tobytes().hex()} "
        f"{hashlib.sha256(r.routed_experts.tobytes()).hexdigest()}"
        for r in rollouts
    ]


def net_of(engine: Engine) -> Any:
    """The engine's model."""
    (net,) = engine.llm.collective_rpc(lambda worker: worker.model_runner.get_model())
    return net


def routers_of(engine: Engine) -> dict[int, Any]:
    """The routers of an engine's MoE layers, by the layers' numbers."""
    modules = net_of(engine).modules()
    return {module.layer_id: module.router for module in modules if hasattr(module, "router")}


@contextmanager
def rope_wrong_beyond(context: int, engine: Engine) -> Iterator[None]:
    """Inside, the engine rotates positions beyond the context with half of the factor."""
    found = (getattr(module, "cos_sin_cache", None) for module in net_of(engine).modules())
    caches = {id(cache): cache for cache in found if cache is not None}.values()
    kept = [cache.clone() for cache in caches]
    for cache in caches:
        rows = len(cache) - context
        beyond = cache[context : context + -(-rows // 2)]
        cache[context:] = beyond.repeat_interleave(2, 0)[:rows]
    yield
    for cache, right in zip(caches, kept, strict=True):
        cache.copy_(right)


def held_tensors(engine: Engine) -> dict[str, str]:
    """Digest of every parameter and buffer of the engine's model."""
    net = net_of(engine)
    return {
        name: hashlib.sha256(
            tensor.detach().contiguous().clone().view(-1).view(torch.uint8).numpy().data
        ).hexdigest()
        for name, tensor in (*net.named_parameters(), *net.named_buffers())
        if tensor.numel()
    }
