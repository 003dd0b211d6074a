"""Rows of any source, each checked once, and the seeded order of prompts."""
