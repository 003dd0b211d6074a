"""What the policy's layers are made of: attention, experts, norms, and who computes which token."""
