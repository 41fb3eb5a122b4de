"""torch and transformers live here, and nowhere else in the worker."""
