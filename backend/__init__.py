"""What runs inside the worker process of one loaded model."""
