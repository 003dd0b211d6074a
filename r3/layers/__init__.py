"""Parts of the policy's layers: attention, experts, norms, and the split of tokens over ranks."""
