import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.paged_attention import RaggedBatch, Workspace, naive, paged_attention
from kernels.quantised import LARGEST
from tests.kernels.paged import SCALE, Case, dense_attention, make_case

pytestmark = pytest.mark.usefixtures("cpu_path")
HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1), "smollm2": (9, 3)}
RAGGED = {
    "decodes of all lengths": ([1] * 9, [1, 2, 15, 16, 17, 31, 33, 64, 130]),
    "whole prompts": ([1, 7, 16, 33], [1, 7, 16, 33]),
    "chunks": ([16, 5, 31], [40, 21, 97]),
    "mixed": ([1, 20, 1, 3, 1, 17], [50, 20, 1, 90, 33, 17]),
}


def run(case: Case, **options: float | Tensor | None) -> Tensor:
    workspace = Workspace(int(case.batch.context_lens.max()), *case.keys.shape[1:], case.query.dtype)
    return paged_attention(
        case.query,
        case.keys,
        case.values,
        case.batch,
        scale=SCALE,
        workspace=workspace,
        kv_scales=case.kv_scales,
        **options,
    )


def specified(case: Case, **options: float | Tensor | None) -> Tensor:
    return naive.paged_attention(
        case.query, case.keys, case.values, case.batch, scale=SCALE, kv_scales=case.kv_scales, **options
    )


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 9}, {"softcap": 1.5}, {"sinks": torch.tensor([1.0, -2.0, 0.0, 4.0])}], ids=str
)
def test_naive_is_dense_attention(ragged, options):
    """The specification itself gives what float64 attention over the plain keys and values gives."""
    case = make_case(*RAGGED[ragged], num_heads=4, num_kv_heads=2, head_dim=8, block_size=16)
    got = specified(case, **options).double()
    torch.testing.assert_close(got, dense_attention(case, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_torch_path_is_naive(ragged, heads, head_dim):
    """For all head groupings the fast path equals the specification, with poison in all it must not read."""
    num_heads, num_kv_heads = HEADS[heads]
    case = make_case(*RAGGED[ragged], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16)
    torch.testing.assert_close(run(case), specified(case), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
@pytest.mark.parametrize(
    "options", [{"sliding_window": 1}, {"sliding_window": 20}, {"sliding_window": 500}, {"softcap": 2.0}], ids=str
)
def test_windows_caps_and_block_sizes(ragged, block_size, options):
    """Sliding windows (cutting blocks, shorter and longer than contexts) and soft caps hold for any block size."""
    case = make_case(*RAGGED[ragged], num_heads=4, num_kv_heads=2, head_dim=8, block_size=block_size)
    torch.testing.assert_close(run(case, **options), specified(case, **options), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 9, "softcap": 2.0}], ids=str)
def test_sinks(ragged, options):
    """A sink takes its share of every softmax, with and without windows and caps."""
    case = make_case(*RAGGED[ragged], num_heads=4, num_kv_heads=2, head_dim=8, block_size=16)
    options = options | {"sinks": torch.tensor([1.0, -2.0, 0.0, 4.0])}
    torch.testing.assert_close(run(case, **options), specified(case, **options), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
def test_quantised_caches(ragged, kv_dtype):
    """A cache of one byte is attended over as the numbers that it holds; poisoned scales are not read."""
    case = make_case(*RAGGED[ragged], num_heads=4, num_kv_heads=2, head_dim=8, block_size=16, kv_dtype=kv_dtype)
    got = run(case)
    torch.testing.assert_close(got, specified(case), atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(got.double(), dense_attention(case), atol=1e-5, rtol=1e-5)


def test_a_quantised_cache_needs_scales():
    """A programmer's error, not garbage."""
    case = make_case([1], [5], num_heads=1, num_kv_heads=1, head_dim=8, block_size=16, kv_dtype=torch.int8)
    workspace = Workspace(5, *case.keys.shape[1:], case.query.dtype)
    with pytest.raises(AssertionError, match="scales"):
        paged_attention(case.query, case.keys, case.values, case.batch, scale=SCALE, workspace=workspace)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str)
def test_half_precision(dtype, tolerance):
    """In half precision the fast path stays as near to float64 as the format allows."""
    case = make_case(*RAGGED["mixed"], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    torch.testing.assert_close(run(case).double(), dense_attention(case), atol=tolerance, rtol=tolerance)


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 60)), min_size=1, max_size=12),
    block_size=st.sampled_from([4, 16]),
    sliding_window=st.none() | st.integers(1, 50),
)
def test_any_ragged_batch(lens, block_size, sliding_window):
    """Any mixture of query and context lengths gives what the specification gives."""
    query_lens = [query_len for query_len, _ in lens]
    context_lens = [query_len + before for query_len, before in lens]
    case = make_case(query_lens, context_lens, num_heads=2, num_kv_heads=1, head_dim=8, block_size=block_size)
    want = specified(case, sliding_window=sliding_window)
    torch.testing.assert_close(run(case, sliding_window=sliding_window), want, atol=2e-6, rtol=2e-6)


def test_many_decodes_are_cut_into_bounded_groups():
    """A batch that is bigger than the workspace, of very different lengths, is computed in several groups."""
    lens = [1, 3000, 2900, 17, 500, 510, 2000] * 3
    case = make_case([1] * len(lens), lens, num_heads=2, num_kv_heads=2, head_dim=64, block_size=64)
    workspace = Workspace(max(lens), *case.keys.shape[1:], case.keys.dtype)
    assert 1 < len(workspace.groups(case.batch, None)) < len(lens)
    torch.testing.assert_close(run(case), specified(case), atol=2e-6, rtol=2e-6)


def test_workspace_serves_step_after_step():
    """What an earlier step and another window left in the workspace does not show in the next."""
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "block_size": 16}
    workspace = Workspace(128, 16, 1, 8, torch.float32)
    for seed, lens in enumerate(([90, 40], [1, 3], [128, 16])):
        case = make_case([1, 1], lens, **shape, seed=seed)
        for window in (None, 5, None):
            options = {"scale": SCALE, "workspace": workspace, "sliding_window": window}
            got = paged_attention(case.query, case.keys, case.values, case.batch, **options)
            torch.testing.assert_close(got, specified(case, sliding_window=window), atol=2e-6, rtol=2e-6)


def test_a_batch_must_make_sense():
    """A context shorter than its queries, or a missing block table, is a programmer's error."""
    table = np.zeros((1, 4), np.int32)
    with pytest.raises(AssertionError):
        RaggedBatch(np.array([5], np.int32), np.array([4], np.int32), table)
    with pytest.raises(AssertionError):
        RaggedBatch(np.array([1, 1], np.int32), np.array([4, 4], np.int32), table)
