from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.paged_attention import RaggedBatch, Workspace, triton_path
from kernels.quantised import LARGEST
from tests.kernels.paged import SCALE, Case, dense_attention, make_case

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SPLIT = 64

DECODES = [1] * 6, [1, 2, 17, 64, 65, 140]
MIXED = [1, 20, 1, 3, 33], [70, 20, 1, 90, 40]
GROUPS = [  # query heads, kv heads, head_dim, block_size
    (2, 2, 64, 16),
    (4, 2, 80, 32),
    (6, 2, 96, 16),
    (4, 1, 128, 32),
    (5, 1, 64, 32),
    (6, 1, 128, 16),
    (7, 1, 80, 16),
    (8, 1, 96, 32),
]
OPTIONS = {
    "window of one": {"sliding_window": 1},
    "window over splits": {"sliding_window": 66},
    "window longer than all": {"sliding_window": 500},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": torch.tensor([1.0, -2.0, 0.0, 4.0])},
    "all": {"sliding_window": 20, "softcap": 1.5, "sinks": torch.tensor([1.0, -2.0, 0.0, 4.0])},
}


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of several splits, without long ones."""
    monkeypatch.setattr(triton_path, "SPLIT", SPLIT)


def run(case: Case, **options: float | Tensor | None) -> Tensor:
    if isinstance(sinks := options.get("sinks"), Tensor):
        options["sinks"] = sinks.to(case.query.device)
    workspace = Workspace(1, *case.keys.shape[1:], case.query.dtype, case.query.device)
    return triton_path.paged_attention(
        case.query,
        case.keys,
        case.values,
        case.batch,
        scale=SCALE,
        workspace=workspace,
        kv_scales=case.kv_scales,
        **options,
    )


def assert_right(case: Case, **options: float | Tensor | None) -> None:
    tolerance = TOLERANCE[case.query.dtype]
    got = run(case, **options)
    assert got.dtype == case.query.dtype
    torch.testing.assert_close(got.cpu().double(), dense_attention(case, **options), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), GROUPS, ids=str)
def test_heads_and_blocks(lens, heads, kv_heads, head_dim, block_size, device):
    """All groupings of heads and sizes of heads and blocks, with poison in all that must not be read."""
    case = make_case(
        *lens, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, block_size=block_size, device=device
    )
    assert_right(case)


@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decodes", "mixed"])
@pytest.mark.parametrize("options", OPTIONS)
def test_windows_caps_and_sinks(lens, options, device):
    """Windows that cut blocks and splits, soft caps, sinks, and all at once."""
    case = make_case(*lens, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, device=device)
    assert_right(case, **OPTIONS[options])


@pytest.mark.parametrize("lens", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_nothing_before_a_window_is_read(lens, device):
    """What no query of a sequence sees any more may be anything."""
    window = 20
    case = make_case(*lens, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, device=device)
    for seq, (query_len, context_len) in enumerate(zip(*lens, strict=True)):
        for position in range(context_len - query_len - window + 1):
            slot = int(case.batch.block_tables[seq, position // 16]), position % 16
            case.keys[slot] = case.values[slot] = torch.nan
    assert_right(case, sliding_window=window)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype, device):
    """In half precision the result is as near to float64 as the format allows."""
    case = make_case(*MIXED, num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype, device=device)
    assert_right(case)


@pytest.mark.parametrize("kv_dtype", LARGEST, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_quantised_caches(kv_dtype, dtype, device):
    """A cache of one byte is attended over as the numbers that it holds; poisoned scales are not read."""
    case = make_case(
        *MIXED, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype, kv_dtype=kv_dtype, device=device
    )
    assert_right(case)


@pytest.mark.parametrize("sliding_window", [None, 66])
def test_company_changes_no_bit(sliding_window, device):
    """A decode's result is the same alone, beside longer contexts, and beside chunks: preemption stays invisible."""
    case = make_case(*DECODES, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, device=device)
    together = run(case, sliding_window=sliding_window)
    for seq in range(len(DECODES[0])):
        batch = RaggedBatch(
            case.batch.query_lens[[seq]], case.batch.context_lens[[seq]], case.batch.block_tables[[seq]]
        )
        alone = run(replace(case, query=case.query[[seq]], batch=batch), sliding_window=sliding_window)
        assert torch.equal(alone[0], together[seq])


def test_a_nan_stays_in_its_sequence(device):
    """A sequence whose keys are NaN gets NaN, as it should; the others do not notice."""
    case = make_case([1, 4, 1], [30, 30, 90], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, device=device)
    want = run(case)
    case.keys[int(case.batch.block_tables[1, 0]), 3] = torch.nan
    got = run(case)
    assert got[1:5].isnan().all()
    assert torch.equal(got[[0, 5]], want[[0, 5]])


def test_queries_may_be_strided(device):
    """Queries that are a slice of a fused projection are taken as they are."""
    case = make_case(*MIXED, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, device=device)
    fused = torch.full((len(case.query), 8, 70), torch.nan, device=device)
    fused[:, :4, :64] = case.query
    assert_right(replace(case, query=fused[:, :4, :64]))


def test_nothing_to_do(device):
    """A batch without sequences gives no rows."""
    case = make_case([], [], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, device=device)
    assert run(case).shape == (0, 4, 64)


def test_tables_are_made_once_per_step(device):
    """All layers of a step share the tables on the device; the next step has its own."""
    case = make_case(*DECODES, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, device=device)
    other = make_case([1], [9], num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, device=device, seed=1)
    workspace = Workspace(1, 16, 2, 64, torch.float32, device)
    for step in (case, case, other, case):
        got = triton_path.paged_attention(
            step.query, step.keys, step.values, step.batch, scale=SCALE, workspace=workspace
        )
        torch.testing.assert_close(got.cpu().double(), dense_attention(step), atol=2e-5, rtol=2e-5)
    made = [workspace.once(case.batch, "key", object) for _ in range(2)]
    assert made[0] is made[1]
    assert workspace.once(other.batch, "key", object) is not made[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_any_batch(seed, device):
    """Random batches, shapes, options and formats."""
    rng = np.random.default_rng(seed)
    query_lens = np.where(rng.random(5) < 0.5, 1, rng.integers(1, 150, 5))
    context_lens = query_lens + np.where(rng.random(5) < 0.3, 0, rng.integers(0, 300, 5))
    group, kv_heads = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    case = make_case(
        query_lens.tolist(),
        context_lens.tolist(),
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=int(rng.choice([64, 72, 80, 96, 128, 256])),
        block_size=int(rng.choice([8, 16, 32, 48])),
        dtype=(torch.float32, torch.float16, torch.bfloat16)[rng.integers(3)],
        kv_dtype=(None, torch.int8, torch.float8_e4m3fn)[rng.integers(3)],
        device=device,
        seed=seed,
    )
    sinks = torch.from_numpy(rng.normal(0, 2, group * kv_heads)).float()
    assert_right(
        case,
        sliding_window=(None, int(rng.integers(1, 200)))[rng.integers(2)],
        softcap=(None, 2.0)[rng.integers(2)],
        sinks=(None, sinks)[rng.integers(2)],
    )
