from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels.paged_attention import RaggedBatch, Workspace, naive, paged_attention
from tests.kernels.paged import make_case

SCALE = 0.17

HEADS = {"mha": (4, 4), "gqa": (6, 2), "mqa": (4, 1), "smollm2": (9, 3)}
RAGGED = {
    "decodes of all lengths": ([1] * 9, [1, 2, 15, 16, 17, 31, 33, 64, 130]),
    "whole prompts": ([1, 7, 16, 33], [1, 7, 16, 33]),
    "chunks": ([16, 5, 31], [40, 21, 97]),
    "mixed": ([1, 20, 1, 3, 1, 17], [50, 20, 1, 90, 33, 17]),
}


def dense_attention(
    query: Tensor,
    batch: RaggedBatch,
    dense: Sequence[tuple[Tensor, Tensor]],
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention in float64, one query and head at a time, straight from its formula."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    for seq, (keys, values) in enumerate(dense):
        group = query.shape[1] // keys.shape[1]
        for i in range(int(batch.query_lens[seq])):
            token = int(batch.query_starts[seq]) + i
            position = int(batch.context_lens[seq] - batch.query_lens[seq]) + i
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for head in range(query.shape[1]):
                seen = keys[first : position + 1, head // group].double()
                scores = seen @ query[token, head].double() * SCALE
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                out[token, head] = scores.softmax(0) @ values[first : position + 1, head // group].double()
    return out


def run(query: Tensor, keys: Tensor, values: Tensor, batch: RaggedBatch, **options: float | None) -> Tensor:
    workspace = Workspace(int(batch.context_lens.max()), *keys.shape[1:], keys.dtype)
    return paged_attention(query, keys, values, batch, scale=SCALE, workspace=workspace, **options)


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"softcap": 1.5}], ids=str)
def test_naive_is_dense_attention(ragged, options):
    """The specification itself gives what float64 attention over the plain keys and values gives."""
    query, keys, values, batch, dense = make_case(
        *RAGGED[ragged], num_heads=4, num_kv_heads=2, head_dim=8, block_size=16
    )
    got = naive.paged_attention(query, keys, values, batch, scale=SCALE, **options)
    torch.testing.assert_close(got.double(), dense_attention(query, batch, dense, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_torch_path_is_naive(ragged, heads, head_dim):
    """For all head groupings the fast path equals the specification, with poison in all it must not read."""
    num_heads, num_kv_heads = HEADS[heads]
    query, keys, values, batch, _ = make_case(
        *RAGGED[ragged], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16
    )
    want = naive.paged_attention(query, keys, values, batch, scale=SCALE)
    torch.testing.assert_close(run(query, keys, values, batch), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("block_size", [1, 7, 16, 32])
@pytest.mark.parametrize(
    "options", [{"sliding_window": 1}, {"sliding_window": 20}, {"sliding_window": 500}, {"softcap": 2.0}], ids=str
)
def test_windows_caps_and_block_sizes(ragged, block_size, options):
    """Sliding windows (cutting blocks, shorter and longer than contexts) and soft caps hold for any block size."""
    query, keys, values, batch, _ = make_case(
        *RAGGED[ragged], num_heads=4, num_kv_heads=2, head_dim=8, block_size=block_size
    )
    want = naive.paged_attention(query, keys, values, batch, scale=SCALE, **options)
    torch.testing.assert_close(run(query, keys, values, batch, **options), want, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)], ids=str)
def test_half_precision(dtype, tolerance):
    """In half precision the fast path stays as near to float64 as the format allows."""
    query, keys, values, batch, dense = make_case(
        *RAGGED["mixed"], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype
    )
    want = dense_attention(query, batch, dense)
    torch.testing.assert_close(run(query, keys, values, batch).double(), want, atol=tolerance, rtol=tolerance)


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
    query, keys, values, batch, _ = make_case(
        query_lens, context_lens, num_heads=2, num_kv_heads=1, head_dim=8, block_size=block_size
    )
    want = naive.paged_attention(query, keys, values, batch, scale=SCALE, sliding_window=sliding_window)
    got = run(query, keys, values, batch, sliding_window=sliding_window)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_many_decodes_are_cut_into_bounded_groups():
    """A batch that is bigger than the workspace, of very different lengths, is computed in several groups."""
    lens = [1, 3000, 2900, 17, 500, 510, 2000] * 3
    query, keys, values, batch, _ = make_case(
        [1] * len(lens), lens, num_heads=2, num_kv_heads=2, head_dim=64, block_size=64
    )
    workspace = Workspace(max(lens), *keys.shape[1:], keys.dtype)
    assert 1 < len(workspace.plan(batch, None).groups) < len(lens)
    got = paged_attention(query, keys, values, batch, scale=SCALE, workspace=workspace)
    want = naive.paged_attention(query, keys, values, batch, scale=SCALE)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_workspace_serves_step_after_step():
    """What an earlier step and another window left in the workspace does not show in the next."""
    shape = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "block_size": 16}
    workspace = Workspace(128, 16, 1, 8, torch.float32)
    for seed, lens in enumerate(([90, 40], [1, 3], [128, 16])):
        query, keys, values, batch, _ = make_case([1, 1], lens, **shape, seed=seed)
        for sliding_window in (None, 5, None):
            options = {"scale": SCALE, "sliding_window": sliding_window}
            got = paged_attention(query, keys, values, batch, workspace=workspace, **options)
            want = naive.paged_attention(query, keys, values, batch, **options)
            torch.testing.assert_close(got, want, atol=2e-6, rtol=2e-6)


def test_a_batch_must_make_sense():
    """A context shorter than its queries, or a missing block table, is a programmer's error."""
    table = np.zeros((1, 4), np.int32)
    with pytest.raises(AssertionError):
        RaggedBatch(np.array([5], np.int32), np.array([4], np.int32), table)
    with pytest.raises(AssertionError):
        RaggedBatch(np.array([1, 1], np.int32), np.array([4, 4], np.int32), table)


@pytest.mark.parametrize("ragged", RAGGED)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 9}, {"softcap": 1.5}], ids=str)
def test_sinks_take_their_share(ragged, options):
    """A sink is a key of its own logit and a value of zeros; naive and fast path agree with that, in float64."""
    query, keys, values, batch, dense = make_case(
        *RAGGED[ragged], num_heads=4, num_kv_heads=2, head_dim=8, block_size=16
    )
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0])
    window, cap = options.get("sliding_window"), options.get("softcap")
    want = torch.zeros(query.shape, dtype=torch.float64)
    for seq, (own_keys, own_values) in enumerate(dense):
        for i in range(int(batch.query_lens[seq])):
            token = int(batch.query_starts[seq]) + i
            position = int(batch.context_lens[seq] - batch.query_lens[seq]) + i
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            for head in range(4):
                scores = own_keys[seen, head // 2].double() @ query[token, head].double() * SCALE
                scores = scores if cap is None else cap * (scores / cap).tanh()
                weights = torch.cat((scores, sinks[head : head + 1].double())).softmax(0)[:-1]
                want[token, head] = weights @ own_values[seen, head // 2].double()
    got = naive.paged_attention(query, keys, values, batch, scale=SCALE, sinks=sinks, **options)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(run(query, keys, values, batch, sinks=sinks, **options), got, atol=2e-6, rtol=2e-6)
