"""Agents that call the model: workflows, the endpoint, commands."""
