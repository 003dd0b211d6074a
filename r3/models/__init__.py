"""Checkpoints: config.json as a `ModelShape`, and safetensors files."""
