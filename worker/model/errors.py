"""What the model side raises. Texts say what to do."""


class ModelError(Exception):
    """A model cannot be had, or cannot be served."""
