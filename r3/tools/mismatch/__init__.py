"""What is known of the mismatch of engine and policy beside its metrics."""
