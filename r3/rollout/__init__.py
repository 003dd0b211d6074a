"""From prompts to rewarded samples: conversations, one round, one step, evaluation."""
