"""Partial rollouts: conversations that continue in a later step (`rollout.step_token_budget`)."""
