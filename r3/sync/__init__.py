"""Transfer between engine and policy: weights, rollouts, device memory."""
