"""Attention in C: a query's bits depend on the query and what it sees, and on nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.paged_attention import RaggedBatch, Workspace, native_path, paged_attention
from kernels.paged_attention.native_path import make_plan
from kernels.quantised import LARGEST
from tests.kernels.paged import SCALE, dense_attention, make_case

CONTEXT = 600  # three splits
CUTS = [(CONTEXT,), (1, CONTEXT - 1), (255, 2, CONTEXT - 257), (17,) * 35 + (5,), (1,) * CONTEXT]
OPTIONS = [
    {},
    {"sliding_window": 290},
    {"sliding_window": 3},
    {"softcap": 2.0},
    {"sinks": torch.tensor([1.0, -9.0, 5.0])},
]


pytestmark = pytest.mark.usefixtures("library")


def attend(case, query_lens, context_lens, query, **options):
    """The case's only sequence, as several with those lengths."""
    tables = np.repeat(case.batch.block_tables, len(query_lens), axis=0)
    batch = RaggedBatch(np.array(query_lens, np.int32), np.array(context_lens, np.int32), tables)
    workspace = Workspace(CONTEXT, *case.keys.shape[1:], query.dtype)
    terms = {"scale": SCALE, "workspace": workspace, "kv_scales": case.kv_scales} | options
    return paged_attention(query, case.keys, case.values, batch, **terms)


@pytest.mark.parametrize("kv_dtype", [None, *LARGEST], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 20])
def test_chunks_decodes_and_threads_give_the_same_bits(kv_dtype, options, head_dim):
    """A prompt at once, in chunks, and token by token; in turns and all together; with one thread and with two."""
    shape = {"num_heads": 3, "num_kv_heads": 1, "head_dim": head_dim, "block_size": 16}
    case = make_case([CONTEXT], [CONTEXT], **shape, kv_dtype=kv_dtype)
    want = attend(case, [CONTEXT], [CONTEXT], case.query, **options)
    torch.testing.assert_close(want.double(), dense_attention(case, **options), atol=1e-5, rtol=1e-5)
    for cut in CUTS:
        ends = np.cumsum(cut)
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            assert torch.equal(attend(case, cut, ends, case.query, **options), want)
    rows = slice(300, 340)
    assert torch.equal(attend(case, [40], [340], case.query[rows], **options), want[rows])


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_plan_serves_layer_after_layer(num_threads):
    """Few decodes of long contexts, in splits that threads share: whoever is last puts a query together, in each layer.

    What a split left behind in the layer before must not be taken for this one's: it is poisoned.
    """
    torch.set_num_threads(num_threads)
    lens = [2000, 300, 700, 9]
    shape = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
    case = make_case([1] * len(lens), lens, **shape)
    queries = [case.query * factor for factor in (1, -2, 3)]
    wants = [dense_attention(replace(case, query=query)) for query in queries]
    plan = make_plan(case.batch, 16, None, 2, 3, 32)
    assert plan.num_done.size > 0, "some contexts are split"
    terms = {"scale": SCALE, "softcap": None, "sinks": None, "kv_scales": None}
    for _ in range(30):
        for query, want in zip(queries, wants, strict=True):
            plan.partials.fill(np.nan)
            got = native_path.attend(query.view(-1, 2, 3, 32), case.keys, case.values, plan, **terms).view_as(want)
            torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
            assert not plan.num_done.any(), "the next layer counts from 0"


@pytest.mark.parametrize("num_heads", [1, 2, 4, 5, 7, 50, 71])
def test_any_number_of_query_heads(num_heads):
    """More than a piece has rows, and what register tiles leave over."""
    case = make_case([9, 1], [300, 270], num_heads=num_heads, num_kv_heads=1, head_dim=32, block_size=8)
    workspace = Workspace(300, *case.keys.shape[1:], torch.float32)
    got = paged_attention(case.query, case.keys, case.values, case.batch, scale=SCALE, workspace=workspace)
    torch.testing.assert_close(got.double(), dense_attention(case), atol=1e-5, rtol=1e-5)


def test_what_is_not_a_number_stays_so():
    """NaN and infinities in a key that is seen reach the query, and no query before it."""
    case = make_case([40], [40], num_heads=2, num_kv_heads=1, head_dim=8, block_size=16)
    for value in (torch.nan, torch.inf):
        block = int(case.batch.block_tables[0, 1])
        case.keys[block, 4] = value  # position 20
        workspace = Workspace(40, *case.keys.shape[1:], torch.float32)
        got = paged_attention(case.query, case.keys, case.values, case.batch, scale=SCALE, workspace=workspace)
        assert not got[20:].isfinite().all(dim=-1).any() or value == torch.inf
        assert got[:20].isfinite().all()
