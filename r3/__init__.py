"""r3: reinforcement learning of Mixture-of-Experts language models with replayed routes (arXiv 2510.11370)."""

__version__ = "0.1.0"
