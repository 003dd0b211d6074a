"""From prompts to scored rollouts: conversations, rounds, steps, partial rollouts, evaluation."""
