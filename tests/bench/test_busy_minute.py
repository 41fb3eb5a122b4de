"""A sample counts for what its innermost frames belong to."""

import pytest

from bench.busy_minute import classify
from bench.machine import ROOT

OURS = f"execute ({ROOT}/worker/model/runner.py:60)"
LAYER = "forward (/venv/lib/python3.11/site-packages/transformers/models/llama/modeling_llama.py:300)"


@pytest.mark.parametrize(
    ("stack", "group"),
    [
        (OURS, "our Python"),
        (f"{OURS};{LAYER}", "transformers' Python"),
        (f"{LAYER};{OURS};_PyEval_EvalFrameDefault (libpython3.11.so.1.0)", "our Python"),
        (f"{OURS};gc_collect_main (/usr/lib/libpython3.11.so.1.0)", "our Python"),
        (f"{OURS};at::native::add (libtorch_cpu.so)", "torch's operators"),
        (f"{OURS};dnnl_primitive_execute (libtorch_cpu.so);0x7f00 (anon)", "torch's operators"),
        (f"{OURS};ffi_call (libffi.so);attend_decodes (kernels-1f2e.so)", "our kernels in C"),
        (f"{OURS};at::native::add (libtorch_cpu.so);gomp_barrier_wait (libgomp.so.1)", "waiting"),
        ("run_once (/usr/lib/python3.11/asyncio/base_events.py:1884);epoll_wait (/usr/lib/libc.so.6)", "waiting"),
        ("run_once (/usr/lib/python3.11/asyncio/base_events.py:1922)", "other Python: torch, asyncio"),
        ("start_thread (libc.so.6);0x7f00 (anon)", "other native code"),
    ],
)
def test_a_sample_counts_for_its_innermost_known_frame(stack: str, group: str):
    assert classify([f"{stack} 3"]) == {group: 3}
