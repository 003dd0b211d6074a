"""The engine as the step sees it: wake, take weights, generate, sleep. Every wrong order is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch

from r3.engine import memory
from r3.engine.build import build_llm
from r3.engine.generate import Request, generate
from r3.engine.sampler import Sampler
from r3.engine.weights import push
from r3.runtime.device import preserved_random_state
from r3.types import Rollout

if TYPE_CHECKING:
    from vllm import LLM

    from r3.config import Config
    from r3.models.shape import ModelShape
    from r3.runtime.device import Device

Part = Literal["weights", "kv_cache"]


class EngineStateError(RuntimeError):
    """A call that would sample stale or absent weights, or touch memory the policy owns."""


class WeightMismatch(RuntimeError):
    """Weights offered to the engine are not exactly the model's: a name is missing, unknown or has another shape."""


class Engine:
    """A vLLM engine colocated with the policy.

    Order of calls in a step: `wake("weights")`, `load_weights`, `reset_cache`, `wake("kv_cache")`, `generate`, `sleep`.

    Attributes:
        version: the policy version whose weights it holds; -1 until the first `load_weights`.
        capture: whether it returns routed experts.
        on_missing: what an incomplete capture does: stop the run, or become rows of -1.
        speaks: whether this rank returns them: of the ranks that share one engine, the first does, and the others'
            rollouts are not used.
        max_model_len: tokens of the longest conversation.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        shape: ModelShape,
        tokenizer: Any,
        *,
        max_model_len: int,
    ) -> None:
        """Build it asleep. All ranks must call at the same place."""
        self.shape = shape
        self.tokenizer = tokenizer
        self.device = device
        self.capture = config.replay.mode == "r3" and bool(shape.moe_layers)
        self.on_missing = config.replay.on_missing
        self.is_leader = device.rank % config.parallel.engine_tp == 0
        self.policy_version = -1
        self.max_model_len = max_model_len
        self._ranks = config.parallel.engine_tp
        self._sleep_level = config.engine.sleep_level
        self._awake: set[Part] = {"weights", "kv_cache"}
        self._stale_cache = True
        self.llm: LLM = build_llm(config, device, max_model_len=max_model_len, capture=self.capture)
        self._sleeper = memory.Sleeper(self.llm, device)
        self.sleep()

    @property
    def is_asleep(self) -> bool:
        """Whether it holds neither weights nor cache."""
        return not self._awake

    def wake(self, part: Part) -> None:
        """Give memory back to a part: first the weights, then, once they are current, the KV cache."""
        if part in self._awake:
            raise EngineStateError(f"wake({part!r}): it is awake already")
        if part == "kv_cache" and "weights" not in self._awake:
            raise EngineStateError(
                "wake('kv_cache') before wake('weights'): the cache comes last, when weights are in"
            )
        self._sleeper.wake(part)
        self._awake.add(part)

    def load_weights(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        weights: Iterable[tuple[str, torch.Tensor]],
        *,
        policy_version: int,
    ) -> None:
        """Replace all weights by `weights` (Hugging Face names, full tensors) and become `version`.

        Args:
            shapes: name -> shape of everything `weights` will yield; checked against the model before anything is touched.
            weights: streamed; a tensor must stay unchanged until this returns.

        Raises:
            EngineStateError: the weight memory is asleep.
            WeightMismatch: a name is missing, unknown, misshaped or was announced and not delivered.
        """
        if "weights" not in self._awake:
            raise EngineStateError(
                "load_weights while the weights sleep: call wake('weights') first"
            )
        expected = self.shape.tensor_shapes
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
        self.policy_version = -1  # until everything is in, the engine is no version of the policy
        delivered: set[str] = set()

        def counted() -> Iterable[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if (
                    name not in expected
                    or tuple(tensor.shape) != expected[name]
                    or name in delivered
                ):
                    raise WeightMismatch(
                        f"{name} {tuple(tensor.shape)} was not announced so, or came twice"
                    )
                delivered.add(name)
                yield name, tensor

        unloaded = push(self.llm, counted(), tied=self.shape.tied)
        problems = [
            f"announced but not delivered: {name}" for name in sorted(expected.keys() - delivered)
        ]
        problems += [f"engine parameter left at its old value: {name}" for name in sorted(unloaded)]
        if problems:
            raise WeightMismatch(
                _listing("the engine is incomplete; push all weights again", problems)
            )
        self.policy_version = policy_version

    def reset_cache(self) -> None:
        """Forget cached prefixes, and with them the KV and the routes of older weights."""
        if not self.llm.llm_engine.reset_prefix_cache():
            raise EngineStateError("the prefix cache could not be reset: requests are in flight")
        self._stale_cache = False

    def generate(
        self,
        requests: Sequence[Request],
        *,
        policy_version: int,
        on_finished: Callable[[int, Rollout], None] = lambda _index, _rollout: None,
    ) -> list[Rollout]:
        """Answer all requests with the weights of `version`; see `r3.engine.generate.generate`.

        Raises:
            EngineStateError: asleep, weights of another version, or a prefix cache of older weights.
        """
        self._refuse_stale(policy_version)
        return generate(self, requests, on_finished)

    @contextmanager
    def sampler(self, *, policy_version: int) -> Iterator[Sampler]:
        """Turns of conversations with the weights of `version`, added and ended at any time while others are in flight.

        The caller's random state is left as it was. All ranks of one engine must enter, add and step together.

        Raises:
            EngineStateError: asleep, weights of another version, or a prefix cache of older weights.
        """
        self._refuse_stale(policy_version)
        with preserved_random_state():
            yield Sampler(self)

    def share(self, item: Any) -> Any:
        """What the rank that speaks for this engine says, on all its ranks. All of them must call."""
        if self._ranks == 1:
            return item
        from vllm.distributed.parallel_state import get_tp_group

        group, box = get_tp_group(), [item]
        torch.distributed.broadcast_object_list(box, src=group.ranks[0], group=group.cpu_group)
        return box[0]

    def _refuse_stale(self, policy_version: int) -> None:
        if asleep := sorted({"weights", "kv_cache"} - self._awake):
            raise EngineStateError(f"generate while {' and '.join(asleep)} sleep: wake them first")
        if self.policy_version != policy_version:
            raise EngineStateError(
                f"generate for policy version {policy_version}, but the engine holds version {self.policy_version}"
            )
        if self._stale_cache:
            raise EngineStateError(
                "generate after new weights without reset_cache(): old KV and old routes would be served"
            )

    def sleep(self) -> None:
        """Give the KV cache's memory (on CUDA the weights' too) to the policy. Nothing may be in flight."""
        if not self._awake:
            raise EngineStateError("sleep(): it is asleep already")
        if self.llm.llm_engine.has_unfinished_requests():
            raise EngineStateError("sleep() with requests in flight: they would never finish")
        self._sleeper.sleep(self._sleep_level)
        self._awake.clear()
        self.device.release_memory()


def _listing(title: str, problems: Sequence[str], limit: int = 12) -> str:
    more = [f"... and {len(problems) - limit} more"] if len(problems) > limit else []
    return "\n".join([title, *(f"  - {problem}" for problem in [*problems[:limit], *more])])
