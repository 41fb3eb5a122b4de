import pytest
import torch

from worker.model import kv_cache
from worker.model.errors import ModelError
from worker.model.kv_cache import KVCache, KVShape, available_ram, num_blocks_for_ram


def test_a_block_of_all_layers_is_one_extent():
    """Moving a block is one copy: its keys and values of all layers lie together, and the layers' views share it."""
    wide, narrow = KVShape(num_kv_heads=2, head_dim=8), KVShape(num_kv_heads=1, head_dim=4)
    cache = KVCache(4, block_size=16, shapes=[wide, narrow, wide], dtype=torch.float32)
    assert cache.blocks[2].is_contiguous()
    assert cache.blocks[2].numel() == 16 * 2 * (2 * 8 + 4 + 2 * 8)
    assert [keys.shape for keys, _ in cache.layers] == [(4, 16, 2, 8), (4, 16, 1, 4), (4, 16, 2, 8)]
    cache.blocks.zero_()
    for layer, (keys, values) in enumerate(cache.layers):
        keys[2] += 2 * layer + 1
        values[2] += 2 * layer + 2
    assert (cache.blocks[[0, 1, 3]] == 0).all()
    parts = cache.blocks[2].split([256, 256, 64, 64, 256, 256])  # keys and values of each layer
    assert all((part == number).all() for number, part in enumerate(parts, start=1))


def test_the_pool_is_a_share_of_what_is_free(monkeypatch):
    """Blocks fill the share of RAM, at most the bytes allowed and at most what all seats can use."""
    monkeypatch.setattr(kv_cache, "available_ram", lambda: 1000 * 160)
    sizes = {"bytes_per_token": 10, "block_size": 16, "max_model_len": 4096, "max_num_seqs": 64}
    assert num_blocks_for_ram(**sizes, share=0.5) == 500
    assert num_blocks_for_ram(**sizes, share=0.5, max_bytes=3300) == 20
    assert num_blocks_for_ram(**sizes | {"max_model_len": 17, "max_num_seqs": 3}, share=0.5) == 6
    with pytest.raises(ModelError, match=r"no KV block .* take a larger --kv-memory-share"):
        num_blocks_for_ram(**sizes, share=0.5, max_bytes=100)


def test_available_ram_respects_the_machine_and_the_container(monkeypatch, tmp_path):
    """Free memory of the machine, less where a control group allows less."""
    meminfo, limit, used = tmp_path / "meminfo", tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(kv_cache, "_MEMINFO", meminfo)
    monkeypatch.setattr(kv_cache, "_CGROUP_LIMIT", limit)
    monkeypatch.setattr(kv_cache, "_CGROUP_USED", used)
    assert available_ram() > 0
    meminfo.write_text("MemTotal: 900 kB\nMemAvailable: 500 kB\n")
    assert available_ram() == 500 * 1024
    used.write_text("1000\n")
    limit.write_text("max\n")
    assert available_ram() == 500 * 1024
    limit.write_text("5000\n")
    assert available_ram() == 4000
