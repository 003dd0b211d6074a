"""The generation world: one vLLM engine inside every rank. The only package that imports vllm, and only when one is built."""

from r3.engine.build import EngineConfigError
from r3.engine.engine import Engine, EngineStateError, WeightMismatch
from r3.engine.generate import Request, Sampled, Sampling, Transcript, Turn, sampling_seed
from r3.engine.routes import RouteError, check_routes

__all__ = [
    "Engine",
    "EngineConfigError",
    "EngineStateError",
    "Request",
    "RouteError",
    "Sampled",
    "Sampling",
    "Transcript",
    "Turn",
    "WeightMismatch",
    "check_routes",
    "sampling_seed",
]
