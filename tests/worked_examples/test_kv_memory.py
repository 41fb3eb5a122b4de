"""How much KV fits where: the worked numbers of the literature, through the code that the product runs."""

import pytest
import torch

from tests.engine.builders import make_request
from worker.engine.config import SchedulerConfig
from worker.engine.outputs import FinishEvent
from worker.engine.scheduler import Scheduler
from worker.model.attention import AttentionLayer, Visibility
from worker.model.kv_cache import KVCache, KVShape
from worker.model.loader import LoadedModel

NUM_BLOCKS, BLOCK_SIZE = 8192, 16
LLAMA_2_7B = [KVShape(num_kv_heads=32, head_dim=128)] * 32


def bytes_per_token(shapes: list[KVShape]) -> int:
    """The loader's formula on a model of these layers with KV in fp16."""
    model = LoadedModel(
        name="shape only",
        model=None,
        tokenizer=None,
        vocab_size=1,
        max_model_len=1,
        eos_token_ids=(),
        bos_token_id=None,
        kv_dtype=torch.float16,
        layers=tuple(AttentionLayer(shape, Visibility()) for shape in shapes),
    )
    return model.bytes_per_token


def test_a_token_of_llama_2_7b_is_half_a_mebibyte():
    """32 layers x 32 heads x 128 x keys and values x 2 bytes are 0.5 MiB, by the loader's formula and in the pool."""
    assert bytes_per_token(LLAMA_2_7B) == 2**19
    cache = KVCache(num_blocks=1, block_size=1, shapes=LLAMA_2_7B, dtype=torch.float16)
    assert cache.blocks.nbytes == 2**19


@pytest.mark.parametrize(("num_tokens", "fits"), [(131_072, True), (131_073, False)])
def test_8192_blocks_of_16_hold_131_072_tokens(num_tokens: int, fits: bool):
    """A request of 131,072 tokens in all is served; one token more never fits."""
    config = SchedulerConfig(
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        max_num_seqs=1,
        max_num_batched_tokens=num_tokens,
        max_model_len=2 * num_tokens,
    )
    events = Scheduler(config).add(make_request(prompt=num_tokens - 1, max_tokens=1))
    assert [isinstance(event, FinishEvent) for event in events] == ([] if fits else [True])
