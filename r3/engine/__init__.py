"""One vLLM engine inside every rank: weights in, sampled tokens and their routes out.

This is the only package of the core that imports vllm, and it does so only when an engine is built.
"""

from r3.engine.build import EngineConfigError
from r3.engine.direct_weights import WeightMismatch
from r3.engine.engine import Engine, EngineStateError, forget_engine
from r3.engine.memory import DeviceMemoryError
from r3.engine.parsers import message_parser
from r3.engine.sampler import Sampled, Sampling, Turn, sampling_seed
from r3.engine.transcript import CaptureSpec, Transcript
