"""Whole layers in C, against float64; and that a token's bits depend on nothing but what it sees."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import decoder_layers
from kernels.decoder_layers import DecoderLayer, DecoderLayers, LayerCache, Norm, profiled
from kernels.packed_product import Arena, PackedWeight
from kernels.paged_attention import RaggedBatch
from kernels.paged_attention.native_path import make_plan
from kernels.quantised import LARGEST, dequantise, quantise

HIDDEN, KV_HEADS, GROUP, DIM, MLP, BLOCK, EPSILON = 48, 2, 3, 16, 300, 4, 1e-5
NUM_TOKENS = 70


pytestmark = pytest.mark.usefixtures("library")


@dataclass
class Weights:
    """Of a layer, as they are before they are packed."""

    qkv: tuple[Tensor, Tensor]
    o: tuple[Tensor, None]
    gate_up: tuple[Tensor, None]
    down: tuple[Tensor, None]
    norms: list[Tensor]  # input, post, query, key


def make_weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    width = (GROUP + 2) * KV_HEADS * DIM
    return Weights(
        (draw(width, HIDDEN), draw(width)),
        (draw(HIDDEN, GROUP * KV_HEADS * DIM), None),
        (draw(2 * MLP, HIDDEN), None),
        (draw(HIDDEN, MLP), None),
        [1 + draw(size) for size in (HIDDEN, HIDDEN, DIM, DIM)],
    )


def packed(weights: Weights, *, has_head_norms: bool) -> DecoderLayer:
    arena = Arena()
    norms = [Norm(weight, EPSILON) for weight in weights.norms]
    return DecoderLayer(
        input_norm=norms[0],
        qkv=PackedWeight(*weights.qkv, arena),
        query_norm=norms[2] if has_head_norms else None,
        key_norm=norms[3] if has_head_norms else None,
        o=PackedWeight(*weights.o, arena),
        post_norm=norms[1],
        gate_up=PackedWeight(*weights.gate_up, arena),
        down=PackedWeight(*weights.down, arena),
        num_kv_heads=KV_HEADS,
        group=GROUP,
        head_dim=DIM,
        scale=DIM**-0.5,
    )


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight.double()


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [num_tokens, heads, head_dim]: the first dimensions turn, the first half of them with the second."""
    size = cos.shape[-1]
    turning, rest = x[..., :size], x[..., size:]
    other = torch.cat((-turning[..., size // 2 :], turning[..., : size // 2]), -1)
    return torch.cat((turning * cos[:, None].double() + other * sin[:, None].double(), rest), -1)


def naive(
    x: Tensor, weights: Weights, cos: Tensor, sin: Tensor, kv_dtype: torch.dtype, *, has_head_norms: bool
) -> Tensor:
    """The layer in float64, of one sequence from its first token on."""
    heads = KV_HEADS * GROUP
    qkv = norm(x, weights.norms[0]) @ weights.qkv[0].double().T + weights.qkv[1].double()
    qkv = qkv.view(len(x), -1, DIM)
    query, key, value = qkv[:, :heads], qkv[:, heads : heads + KV_HEADS], qkv[:, heads + KV_HEADS :]
    if has_head_norms:
        query, key = norm(query, weights.norms[2]), norm(key, weights.norms[3])
    query, key = turn(query, cos, sin), turn(key, cos, sin)
    if kv_dtype in LARGEST:
        key, value = (dequantise(*quantise(kv, kv_dtype)).double() for kv in (key, value))
    key, value = (kv.repeat_interleave(GROUP, 1) for kv in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * DIM**-0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value).flatten(1)
    x = x + attended @ weights.o[0].double().T
    gate, up = (norm(x, weights.norms[1]) @ weights.gate_up[0].double().T).chunk(2, -1)
    return x + (torch.nn.functional.silu(gate) * up) @ weights.down[0].double().T


def run(layers, x, cos, sin, cut, kv_dtype=torch.float32):
    """A sequence of len(x) tokens in chunks of the lengths `cut`, a call each, over a cache that is poisoned."""
    num_blocks = -(-len(x) // BLOCK)
    shape = (num_blocks, BLOCK, KV_HEADS)
    caches = []
    for _ in layers:
        keys, values = (torch.full((*shape, DIM), torch.nan) for _ in range(2))
        scales = None
        if kv_dtype in LARGEST:
            keys, values = (torch.zeros(*shape, DIM).to(kv_dtype) for _ in range(2))
            scales = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
        caches.append(LayerCache(keys, values, scales))
    bound = DecoderLayers(layers, caches)
    table = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).to(torch.int32)[None]
    out, start = [], 0
    for count in cut:
        end = start + count
        batch = RaggedBatch(np.array([count], np.int32), np.array([end], np.int32), table.numpy())
        plan = make_plan(batch, BLOCK, None, KV_HEADS, GROUP, DIM)
        positions = torch.arange(start, end)
        slots = table[0, positions // BLOCK].long(), positions % BLOCK
        out.append(bound.run(x[start:end], cos[start:end], sin[start:end], *slots, [plan] * len(layers)))
        assert not plan.num_done.any(), "the next layer counts from 0"
        start = end
    return torch.cat(out)


def inputs(rotary_dim: int = DIM, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(3))
    angles = torch.arange(num_tokens)[:, None] / 10 ** torch.linspace(0, 2, rotary_dim // 2)
    return x, torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


@pytest.mark.parametrize("kv_dtype", [torch.float32, *LARGEST], ids=str)
@pytest.mark.parametrize("has_head_norms", [False, True])
@pytest.mark.parametrize("rotary_dim", [DIM, 6])
def test_it_is_the_layer(kv_dtype, has_head_norms, rotary_dim):
    """Float64's numbers to rounding: two layers with biases, with and without norms of heads, heads turned in part."""
    weights = [make_weights(seed) for seed in (0, 1)]
    x, cos, sin = inputs(rotary_dim)
    want = x.double()
    for part in weights:
        want = naive(want, part, cos, sin, kv_dtype, has_head_norms=has_head_norms)
    layers = [packed(part, has_head_norms=has_head_norms) for part in weights]
    got = run(layers, x, cos, sin, [NUM_TOKENS], kv_dtype)
    # A number that lies between two of a byte's may be rounded either way.
    tolerance = {torch.float32: 2e-5, torch.int8: 2e-2, torch.float8_e4m3fn: 1e-1}[kv_dtype]
    torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)


def test_bits_depend_on_no_chunk_thread_or_limit(monkeypatch):
    """At once, in chunks, token by token; one thread and two; the feed-forward part in pieces."""
    layers = [packed(make_weights(seed), has_head_norms=True) for seed in (0, 1, 2)]
    x, cos, sin = inputs()
    want = run(layers, x, cos, sin, [NUM_TOKENS])
    kept = x.clone()
    for num_threads, mlp_rows in ((1, 512), (2, 512), (2, 7)):
        torch.set_num_threads(num_threads)
        monkeypatch.setattr(decoder_layers, "_MLP_ROWS", mlp_rows)
        for cut in ([NUM_TOKENS], [33, 1, 36], [1] * NUM_TOKENS):
            assert torch.equal(run(layers, x, cos, sin, cut), want)
    assert torch.equal(x, kept), "the input is not changed"


def test_a_context_in_splits_is_the_same_in_every_layer():
    """Decodes of 1000 tokens, whose four splits are computed by two threads, through three layers of one plan."""
    layers = [packed(make_weights(seed), has_head_norms=True) for seed in (0, 1, 2)]
    num_tokens = 1000
    x, cos, sin = inputs(num_tokens=num_tokens)
    want = run(layers, x, cos, sin, [num_tokens])
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        assert torch.equal(run(layers, x, cos, sin, [num_tokens - 30] + [1] * 30), want)


def test_seconds_are_added_up_while_they_are_asked_for():
    """Three parts, each of which takes some."""
    layers = [packed(make_weights(0), has_head_norms=False)]
    with profiled() as seconds:
        run(layers, *inputs(), [NUM_TOKENS])
        assert (seconds > 0).all()
        kept = seconds.copy()
    run(layers, *inputs(), [NUM_TOKENS])
    assert (seconds == kept).all()


def test_shapes_that_do_not_go_together():
    """A product of another size is no layer's."""
    weights = make_weights(0)
    assert packed(weights, has_head_norms=True).fits
    weights.down = (torch.zeros(HIDDEN, MLP + 1), None)
    assert not packed(weights, has_head_norms=True).fits
