"""The engine as a step uses it: wake, load weights, sample, sleep.

Calls in a wrong order raise `EngineStateError`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from r3 import extras
from r3.engine.build import build_llm, share_of_device
from r3.engine.direct_weights import DirectWeights, WeightMismatch
from r3.engine.route_slots import SlotRoutes
from r3.engine.sampler import CaptureSpec, Sampler
from r3.engine.weight_push import push
from r3.runtime.device import preserved_random_state
from r3.runtime.terminal import say

if TYPE_CHECKING:
    from vllm import LLM

    from r3.config import Config
    from r3.models.shape import ModelShape
    from r3.models.tensors import Experts
    from r3.runtime.device import Device


Part = Literal["weights", "kv_cache"]
_LISTED = 12  # problems in an error


class EngineStateError(RuntimeError):
    """A call would sample from stale or absent weights, or touch memory that the policy owns."""


class Weights(Protocol):
    """A policy's weights, as the engine reads them.

    Attributes:
        shapes: Hugging Face name -> shape of every tensor.
    """

    shapes: dict[str, tuple[int, ...]]

    def read_blocks(
        self, only: Collection[str] | None
    ) -> Iterator[tuple[str | Experts, torch.Tensor]]:
        """Yield full tensors, those of neighbouring experts stacked: all, or those in `only`."""


class Sleeper:
    """Frees and restores the memory of one engine.

    On CUDA this is vLLM's own sleep mode: level 1 keeps weights on the host, level 2 drops them,
    and the next sync brings all of them. vLLM has no sleep mode on CPU. There its scheduler is
    paused the same way, and the KV cache is freed (`r3.backends.cpu.engine.KVCache`). CPU weights
    stay where they are.
    """

    def __init__(self, llm: LLM, device: Device, share: float) -> None:
        self._llm = llm
        self._device, self._share = device, share
        self._cache = None if device.is_cuda else extras.engine_on_cpu().KVCache(llm)

    def sleep(self, level: int) -> None:
        """Pause the scheduler, drop cached prefixes and free memory."""
        # With async scheduling vLLM schedules a batch ahead. The last one belongs to requests that
        # have finished, and would be read after the next wake.
        core = self._llm.llm_engine.engine_core.engine_core
        while core.batch_queue:
            self._llm.llm_engine.step()
        with extras.neighbours_named(self._device, self._share):
            self._llm.sleep(level=level)
        if self._cache:
            self._cache.free()

    def wake(self, part: Part) -> None:
        """Restore the memory of a part. Its contents are lost: weights must be loaded again."""
        if self._cache is None:
            # Waking needs memory that is free on the device; memory that torch caches is not.
            self._device.release_memory()
        elif part == "kv_cache":
            self._cache.restore()
        self._llm.wake_up(tags=[part])

    def fill(self) -> None:
        """Write all of the awake KV cache, so that it takes the memory that it can take on CPU."""
        if self._cache:
            self._cache.fill()


class Engine:
    """A vLLM engine that shares its device with the policy.

    Calls of a step, in order: `wake("weights")`, `load_weights`, `reset_cache`,
    `wake("kv_cache")`, `sampler`, `sleep`.

    Attributes:
        policy_version: version of the weights it holds; -1 from `sleep` until `load_weights`.
        capture: whether it returns routed experts.
        on_missing: "error" refuses an incomplete capture, "live" makes it rows of -1.
        is_leader: whether this rank is the first of those that share one engine. Only the
            leader returns rollouts.
        max_model_len: maximum tokens of a conversation.
        reloaded_experts: MoE layer -> why its experts are not copied straight into the engine's
            tensors. Empty: all are.
        why_reloaded: why the other weights are not; empty if everything is.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        shape: ModelShape,
        tokenizer: Any,
        *,
        max_model_len: int,
        from_disk: bool = False,
    ) -> None:
        """Build the engine asleep. All ranks must call at the same place.

        Its weights are random until the first `load_weights`, since the policy's replace them
        before anything is sampled.

        Args:
            from_disk: load the weights of the checkpoint, for comparisons.
        """
        self.shape = shape
        self.tokenizer = tokenizer
        self.device = device
        self.capture = config.captures and bool(shape.moe_layers)
        self.on_missing = config.replay.on_missing
        self.is_leader = device.rank % config.parallel.engine_tp == 0
        self.policy_version = -1
        self.max_model_len = max_model_len
        self._ranks = config.parallel.engine_tp
        self._sleep_level = config.engine.sleep_level
        self._awake: set[Part] = {"weights", "kv_cache"}
        self._stale_cache = True
        self.reloaded_experts: dict[int, str] = {}
        self.why_reloaded = ""
        self._plan: DirectWeights | None = None  # of the last `load_weights`
        self._has_weights = False
        _, total_gib = device.memory_gib()
        share = share_of_device(config, shape, total_gib)
        self.llm: LLM = build_llm(
            config,
            device,
            shape,
            max_model_len=max_model_len,
            capture=self.capture,
            share=share,
            # A shared prefix has no state of its own: vLLM would cut every prompt to save one.
            prefix_caching=shape.delta is None,
            from_disk=from_disk,
        )
        # vLLM's own looks for stop strings, and may read tokenizer.json otherwise.
        self.llm.llm_engine.output_processor.tokenizer = tokenizer
        self._routes = SlotRoutes(self.llm, shape.moe_layers) if self.capture else None
        self._kept = extras.kept_tokens(self.llm) if config.rollout.restricts else None
        self._sleeper = Sleeper(self.llm, device, share)
        self.sleep()

    @property
    def is_asleep(self) -> bool:
        """Whether it holds neither weights nor cache."""
        return not self._awake

    @property
    def capture_spec(self) -> CaptureSpec:
        """What transcripts need to know of the engine as it is now."""
        return CaptureSpec(
            policy_version=self.policy_version,
            captures=self.capture and self.is_leader,
            on_missing=self.on_missing,
            shape=self.shape,
        )

    def wake(self, part: Part) -> None:
        """Restore the memory of a part: the weights first, the KV cache once they are current.

        Raises:
            EngineStateError: the part is awake, or the cache comes before the weights.
        """
        if part in self._awake:
            raise EngineStateError(f"wake({part!r}): it is awake already")
        if part == "kv_cache" and "weights" not in self._awake:
            raise EngineStateError(
                "wake('kv_cache') before wake('weights'): load the weights first, then wake the "
                "cache"
            )
        self._sleeper.wake(part)
        self._awake.add(part)

    def needed(self, changed: Collection[str]) -> set[str] | None:
        """Return what must be loaded if only some tensors changed since the last load.

        Returns:
            Their names, and those of tensors that the engine has in one parameter with them. None:
            everything, because it has no weights or they go through vLLM's reload.
        """
        return self._plan.beside(changed) if self._plan and self._has_weights else None

    def load_weights(
        self, weights: Weights, *, policy_version: int, only: Collection[str] | None = None
    ) -> None:
        """Replace all weights, or some. All ranks of one engine must call.

        Args:
            weights: the policy's. A tensor must stay unchanged until this returns.
            policy_version: version of the policy that the weights belong to.
            only: names of the tensors to read, from `needed`; None: all.

        Raises:
            EngineStateError: the weight memory is asleep, or the other weights are not there.
            WeightMismatch: a tensor is missing, unknown or misshaped, nothing filled a parameter of
                the engine, or one has a layout that R3 does not know.
        """
        if "weights" not in self._awake:
            rule = "load_weights while the weights sleep: call wake('weights') first"
            raise EngineStateError(rule)
        if only is not None and not self._has_weights:
            raise EngineStateError("load_weights of some tensors: the engine has no others")
        expected, shapes = self.shape.tensor_shapes, weights.shapes
        problems = [f"missing {name}" for name in sorted(expected.keys() - shapes.keys())]
        problems += [f"unknown {name}" for name in sorted(shapes.keys() - expected.keys())]
        problems += [
            f"{name} has shape {tuple(shapes[name])}, the checkpoint {expected[name]}"
            for name in sorted(expected.keys() & shapes.keys())
            if tuple(shapes[name]) != expected[name]
        ]
        if problems:
            raise WeightMismatch(_listing("weights refused, none was loaded", problems))
        self._stale_cache = True
        self._has_weights = False
        self.policy_version = -1  # until everything is in, the engine is no version of the policy
        pushed = push(self.llm, weights.read_blocks(only), self.shape, only=only)
        self._plan = pushed.plan
        if pushed.unloaded:
            left = [f"engine parameter left at its old value: {x}" for x in sorted(pushed.unloaded)]
            raise WeightMismatch(_listing("the engine is incomplete; push all weights again", left))
        if pushed.why and self.is_leader and not self.why_reloaded:
            say(f"note: rank {self.device.rank}: {pushed.note}")
        self.reloaded_experts, self.why_reloaded = pushed.reloaded, pushed.why
        self.policy_version, self._has_weights = policy_version, True

    def reset_cache(self) -> None:
        """Drop cached prefixes: their KV and routes belong to older weights.

        Raises:
            EngineStateError: requests are in flight.
        """
        if not self.llm.llm_engine.reset_prefix_cache():
            raise EngineStateError("the prefix cache could not be reset: requests are in flight")
        self._stale_cache = False

    @contextmanager
    def sampler(self, *, policy_version: int) -> Iterator[Sampler]:
        """Yield a sampler for turns of conversations, sampled with weights of `policy_version`.

        Turns are added and finish at any time while others are in flight. The caller's random
        state is restored. All ranks of one engine must enter, add and step together.

        Raises:
            EngineStateError: the engine is asleep, holds weights of another version, or has a
                prefix cache of older weights.
        """
        self._refuse_stale(policy_version)
        with preserved_random_state():
            yield Sampler(self.llm.llm_engine, self._routes, self._kept)

    def share(self, item: Any) -> Any:
        """Return the leader's item on all ranks of this engine. All of them must call."""
        if self._ranks == 1:
            return item
        from vllm.distributed.parallel_state import get_tp_group

        group, box = get_tp_group(), [item]
        torch.distributed.broadcast_object_list(box, src=group.ranks[0], group=group.cpu_group)
        return box[0]

    def _refuse_stale(self, policy_version: int) -> None:
        if asleep := sorted({"weights", "kv_cache"} - self._awake):
            raise EngineStateError(f"sample while {' and '.join(asleep)} sleep: wake them first")
        if self.policy_version != policy_version:
            raise EngineStateError(
                f"sample with policy version {policy_version}: the engine holds version "
                f"{self.policy_version}"
            )
        if self._stale_cache:
            raise EngineStateError(
                "sample after new weights without reset_cache(): KV and routes of older weights "
                "would be reused"
            )

    def sleep(self) -> None:
        """Free the KV cache's memory, on CUDA the weights' too. Both are lost.

        Raises:
            EngineStateError: it is asleep, or only the weights are awake, or requests are in
                flight.
        """
        if not self._awake:
            raise EngineStateError("sleep(): it is asleep already")
        if "kv_cache" not in self._awake:
            # vLLM's executor is still asleep then, and frees nothing.
            raise EngineStateError(
                "sleep() with only the weights awake: vLLM would keep their memory. Call "
                "wake('kv_cache') first"
            )
        if self.llm.llm_engine.has_unfinished_requests():
            raise EngineStateError("sleep() with requests in flight: they would never finish")
        self._sleeper.sleep(self._sleep_level)
        self._awake.clear()
        self.policy_version = -1
        # Level 2 drops the weights on CUDA.
        self._has_weights &= not (self.device.is_cuda and self._sleep_level == 2)
        self.device.release_memory()

    def fill_cache(self) -> None:
        """Let the awake KV cache take all of its memory, to measure it. Cached prefixes go."""
        self._sleeper.fill()
        self.reset_cache()

    def close(self) -> None:
        """End the engine, in a process that lives on."""
        self.llm.llm_engine.engine_core.engine_core.shutdown()


def _listing(title: str, problems: Sequence[str]) -> str:
    more = [f"... and {len(problems) - _LISTED} more"] if len(problems) > _LISTED else []
    return "\n".join([title, *(f"  - {problem}" for problem in [*problems[:_LISTED], *more])])
