"""What a layer may see, and how chunks, shapes and terms of attention become calls of the kernels."""

import numpy as np
import pytest
import torch
from transformers import masking_utils

from kernels.paged_attention import RaggedBatch, naive
from tests.kernels.paged import make_case
from worker.model.attention import (
    AttentionLayer,
    LayerWorkspaces,
    PagedContext,
    Visibility,
    probed_mask,
    split_at_chunks,
)
from worker.model.errors import ModelError
from worker.model.kv_cache import KVCache, KVShape

NO_PADDING = torch.zeros(1, dtype=torch.int64)


@pytest.mark.parametrize("size", [1, 2, 3, 24, 4096])
def test_masks_are_told_by_what_they_let_a_query_see(size):
    """Windows and chunks of any size, and plain causality beside a size that has no effect."""
    window = masking_utils.sliding_window_causal_mask_function(size)
    chunks = masking_utils.chunked_causal_mask_function(size, NO_PADDING)
    causal = masking_utils.causal_mask_function
    assert probed_mask(mask_function=window, local_size=size).visibility() == Visibility(sliding_window=size)
    if size > 1:  # chunks and windows of one token are the same
        assert probed_mask(mask_function=chunks, local_size=size).visibility() == Visibility(chunk_size=size)
    assert probed_mask(mask_function=causal, local_size=size).visibility() == Visibility()


@pytest.mark.parametrize(
    ("mask_function", "local_size"),
    [
        (masking_utils.bidirectional_mask_function, None),
        (masking_utils.sliding_window_bidirectional_mask_function(8), 8),
        (masking_utils.sliding_window_causal_mask_function(0), 0),  # sees nothing, itself neither
        (masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k % 2 == 0), None),
        (masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < q - 2), None),
    ],
    ids=["both ways", "window both ways", "empty window", "every other", "not the newest"],
)
def test_other_masks_are_refused(mask_function, local_size):
    """What is neither causal nor a window nor chunks has no place here."""
    with pytest.raises(ModelError, match="does not see"):
        probed_mask(mask_function=mask_function, local_size=local_size).visibility()


def test_a_mask_that_depends_on_data_or_is_computed_with_is_refused():
    """A mask that looks up what was read, and a model that adds to a mask, are found out."""
    groups = torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ModelError, match="more than positions"):
        probed_mask(mask_function=masking_utils.blockwise_overlay(groups)).visibility()
    mask = probed_mask(mask_function=masking_utils.causal_mask_function)
    for use in (lambda: mask[:, 0], lambda: torch.zeros(2) + mask, lambda: mask.dtype):
        with pytest.raises(ModelError, match="computes masks"):
            use()


@pytest.mark.parametrize("chunk_size", [8, 16, 64])
def test_chunked_attention_is_attention_over_split_sequences(chunk_size):
    """A query sees its own chunk, in prefill chunks that cross several and in decodes; in float64 from the formula."""
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "block_size": 8}
    case = make_case([1, 20, 33, 1, 5], [50, 20, 70, 1, 61], **shape)
    query, batch = case.query, case.batch
    got = naive.paged_attention(query, case.keys, case.values, split_at_chunks(batch, chunk_size, 8), scale=0.3)
    for seq, (own_keys, own_values) in enumerate(case.dense):
        for i in range(int(batch.query_lens[seq])):
            token = int(batch.query_starts[seq]) + i
            position = int(batch.context_lens[seq] - batch.query_lens[seq]) + i
            seen = slice(position // chunk_size * chunk_size, position + 1)
            for head in range(4):
                scores = own_keys[seen, head // 2].double() @ query[token, head].double() * 0.3
                want = scores.softmax(0) @ own_values[seen, head // 2].double()
                torch.testing.assert_close(got[token, head].double(), want, atol=1e-5, rtol=1e-5)


def test_chunks_end_with_blocks():
    """Chunks that end inside a block would share it: refused when the runner is made."""
    layer = AttentionLayer(KVShape(1, 4), Visibility(chunk_size=24))
    with pytest.raises(ModelError, match="24 tokens are no whole blocks of 16"):
        LayerWorkspaces([layer], 100, 16, torch.float32)
    LayerWorkspaces([layer], 100, 8, torch.float32)


def test_keys_wider_than_values():
    """The shorter is padded in the cache; the result has the values' width and the numbers of plain attention."""
    layers = [AttentionLayer(KVShape(2, 12), Visibility())]
    cache = KVCache(3, 4, [layer.kv_shape for layer in layers], torch.float32)
    cache.blocks.fill_(torch.nan)
    batch = RaggedBatch(np.array([6], np.int32), np.array([6], np.int32), np.array([[2, 0]], np.int32))
    positions = torch.arange(6)
    slots = torch.tensor([2, 0])[positions // 4], positions % 4
    context = PagedContext(layers, cache, LayerWorkspaces(layers, 8, 4, torch.float32), batch, *slots)
    query, key, value = torch.randn(6, 4, 12), torch.randn(6, 2, 12), torch.randn(6, 2, 7)
    got = context.attend(query, key, value, None, scale=0.3, softcap=None, sinks=None)
    assert context.is_complete
    query, key, value = (t.repeat_interleave(4 // t.shape[1], dim=1).transpose(0, 1) for t in (query, key, value))
    want = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.3)
    torch.testing.assert_close(got, want.transpose(0, 1))
