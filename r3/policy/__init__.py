"""The training world: one Megatron-Core shard of the policy in every rank, and its optimizer."""

from r3.policy.policy import Policy, TokenScores, with_routes

__all__ = ["Policy", "TokenScores", "with_routes"]
