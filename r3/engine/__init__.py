"""The generation world: one vLLM engine inside every rank. The only package that imports vllm, and only when one is built."""

from r3.engine.build import EngineConfigError
from r3.engine.engine import Engine, EngineStateError, WeightMismatch
from r3.engine.generate import Request
from r3.engine.sampler import Sampled, Sampling, Turn, sampling_seed
from r3.engine.transcript import Transcript

__all__ = [
    "Engine",
    "EngineConfigError",
    "EngineStateError",
    "Request",
    "Sampled",
    "Sampling",
    "Transcript",
    "Turn",
    "WeightMismatch",
    "sampling_seed",
]
