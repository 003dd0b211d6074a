"""One vLLM engine inside every rank: weights in, sampled tokens and their routes out.

This is the only package of the core that imports vllm, and it does so only when an engine is built.
"""

from r3.engine.build import DeviceMemoryError, EngineConfigError
from r3.engine.direct_weights import WeightMismatch
from r3.engine.engine import Engine, EngineStateError
from r3.engine.sampler import (
    CaptureSpec,
    Sampled,
    Sampler,
    Sampling,
    Transcript,
    Turn,
    sampling_seed,
)
