"""r3: reinforcement learning of Mixture-of-Experts language models with replayed routes (arXiv
2510.11370).
"""

import os

__version__ = "0.1.0"

# Read once, when torch or tokenizers are first imported, which is always after this package.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
