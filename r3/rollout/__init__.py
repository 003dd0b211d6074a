"""From prompts to scored rollouts: conversations, one round, one step, evaluation."""
