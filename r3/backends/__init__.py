"""What makes a device exact or fast. The core reaches it through r3/extras.py."""
