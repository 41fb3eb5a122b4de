"""torch and transformers live here, and nowhere else in the worker."""

import os

# OpenMP reads this when torch is first imported. Its default is that threads spin at every barrier: a decode step has
# hundreds, and where cores are shared (the event loop is enough) a spinning thread keeps the one it waits for from
# running: steps of 170 ms became 530 to 1050 ms.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
