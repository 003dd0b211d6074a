"""Judges: chat models over HTTP, the policy itself, a reward model, a verifier of mathematics."""
