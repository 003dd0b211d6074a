"""What is measured, how the parts of all ranks become one number, and where numbers are shown."""
