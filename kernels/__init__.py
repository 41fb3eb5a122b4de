"""One folder per operation: a torch reference and its fast twin. Import them by full path.

This package shares its name with Hugging Face's `kernels`, which transformers probes by importing it: it must
define a version and import nothing (tests/test_tidy.py holds both).
"""

__version__ = "0.0.0"
