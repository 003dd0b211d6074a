"""What a checkpoint says: its config.json as a `ModelShape`, its safetensors files."""
