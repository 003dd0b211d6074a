"""What a layout needs: memory per device, seconds per step, other layouts, and the verdict."""
