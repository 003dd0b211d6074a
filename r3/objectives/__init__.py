"""Objectives beside reinforcement learning: supervised rows, teachers."""
