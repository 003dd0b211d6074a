"""LoRA: adapters of the policy, the quantised base they train on, PEFT files."""
