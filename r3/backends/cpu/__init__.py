"""CPU: layers of the engine, experts and exchanges of the policy."""
