"""r3: reinforcement learning of Mixture-of-Experts models with replayed routes (arXiv 2510.11370). The step, on one page.

    torchrun --nproc_per_node 2 train.py tiny                     the embedded model, on two CPU ranks
    python train.py --help                                        presets and settings
    python train.py PRESET --dry-run --world-size 8               what would run, and where its memory goes

Every rank runs this program, holds a Megatron-Core shard of the policy and a vLLM engine of its own, and hands the memory
from one to the other. Deliberately absent: an orchestrator, a Trainer class, callbacks, a critic.
"""

from __future__ import annotations

import sys

from r3 import cli


def main() -> None:
    """Parse, build, loop, close."""
    invocation = cli.parse(sys.argv[1:])  # help, dry-run and bad settings end here, before any device is touched
    config = invocation.config

    from r3 import advantage, data, diagnostics, rewards  # heavy imports only now
    from r3.checkpoint import find_latest, load, save
    from r3.device import init_device, leave, seed_everything
    from r3.engine import Engine, Request, sampling_seed
    from r3.evaluate import evaluate, is_due
    from r3.exchange import Scored, distribute
    from r3.mesh import build_mesh
    from r3.metrics import Meter, RunDir
