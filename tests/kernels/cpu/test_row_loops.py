"""Row loops between linear layers: their results against the same computation in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 (the field's name for it)
from torch import Tensor

from rootstock.kernels.cpu.row_loops import PARALLEL_FROM, RowLoops

EPS = 1e-6
# Of a result, relative to the largest of its row: one rounding, and the sums' in float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
DTYPES = list(TOLERANCE)

ROWS = [1, 3, PARALLEL_FROM + 5]  # by the calling thread, and by several


def assert_near(ours: Tensor, exact: Tensor) -> None:
    off = (ours.double() - exact).abs() / exact.abs().amax(-1, keepdim=True)
    assert float(off.max()) <= TOLERANCE[ours.dtype]


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def norm(rows: Tensor, weight: Tensor) -> Tensor:
    exact = rows.double()
    return exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + EPS) * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_a_norm_is_exact_up_to_one_rounding(dtype: torch.dtype, count: int, scale: float) -> None:
    rows, weight = random(count, 72, dtype=dtype, scale=scale), random(72, dtype=torch.float32)
    out = torch.empty_like(rows)
    RowLoops(rows.dtype).rms_norm(rows, weight, EPS, out)
    assert_near(out, norm(rows, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", ROWS)
def test_a_residual_is_added_as_by_torch_and_the_rounded_sum_is_normalised(
    dtype: torch.dtype, count: int
) -> None:
    rows, more = random(count, 72, dtype=dtype), random(count, 72, dtype=dtype).flip(0)
    weight, total, out = random(72, dtype=torch.float32), torch.empty_like(rows), torch.empty_like(rows)
    RowLoops(dtype).add_rms_norm(rows, more, weight, EPS, total, out)
    assert torch.equal(total, rows + more)
    assert_near(out, norm(rows + more, weight))
    RowLoops(dtype).add(rows, more, rows)
    assert torch.equal(rows, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 40.0])  # where the gate is open, bent and shut
@pytest.mark.parametrize(
    ("ours", "activation"),
    [(RowLoops.silu_and_mul, F.silu), (RowLoops.gelu_tanh_and_mul, lambda x: F.gelu(x, approximate="tanh"))],
    ids=["silu", "gelu"],
)
def test_a_gate_is_its_activation_times_up(
    dtype: torch.dtype,
    count: int,
    scale: float,
    ours: Callable[[RowLoops, Tensor, Tensor], None],
    activation: Callable[[Tensor], Tensor],
) -> None:
    gate_up, out = random(count, 2 * 36, dtype=dtype, scale=scale), torch.empty(count, 36, dtype=dtype)
    ours(RowLoops(dtype), gate_up, out)
    gate, up = gate_up.double().chunk(2, -1)
    assert_near(out, activation(gate) * up)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """heads [rows, heads, dim], cos and sin [rows, rotary_dim]"""
    turned, still = heads.split([cos.shape[-1], heads.shape[-1] - cos.shape[-1]], -1)
    half = turned.shape[-1] // 2
    crossed = torch.cat([-turned[..., half:], turned[..., :half]], -1)
    return torch.cat([turned * cos.double()[:, None] + crossed * sin.double()[:, None], still], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize("rotary_dim", [0, 8, 24])
@pytest.mark.parametrize("normed", [False, True])
def test_queries_and_keys_are_normalised_and_rotated_and_values_left_alone(
    dtype: torch.dtype, count: int, rotary_dim: int, normed: bool
) -> None:
    q_heads, kv_heads, dim = 4, 2, 24
    rows = random(count, q_heads + 2 * kv_heads, dim, dtype=dtype)
    before = rows.clone()
    cos, sin = (random(count, rotary_dim, dtype=dtype), random(count, rotary_dim, dtype=dtype).flip(0))
    weights = [random(dim, dtype=torch.float32) + shift if normed else None for shift in (0, 1)]
    query, key = torch.empty(count, q_heads, dim, dtype=dtype), torch.empty(count, kv_heads, dim, dtype=dtype)
    RowLoops(dtype).rotate(rows, weights[0], weights[1], EPS, (cos, sin) if rotary_dim else None, query, key)
    heads = before[:, :q_heads], before[:, q_heads : q_heads + kv_heads]
    for ours, given, weight in zip((query, key), heads, weights, strict=True):
        assert_near(ours, rotated(given.double() if weight is None else norm(given, weight), cos, sin))
    assert torch.equal(rows, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", ROWS)
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (4, 2), (6, 1)])
def test_gates_between_query_heads_are_passed_over_by_the_rotation_and_multiply_attended_heads(
    dtype: torch.dtype, count: int, q_heads: int, kv_heads: int
) -> None:
    dim, loops = 24, RowLoops(dtype)
    rows = random(count, 2 * (q_heads + kv_heads), dim, dtype=dtype, scale=4.0)
    queries, others = rows[:, : 2 * q_heads], rows[:, 2 * q_heads :]
    plain = torch.cat([queries[:, ::2], others], 1)
    cos, sin = (random(count, 8, dtype=dtype), random(count, 8, dtype=dtype).flip(0))
    written = []
    for given, gated in ((plain, False), (rows, True)):
        query, key = (
            torch.empty(count, q_heads, dim, dtype=dtype),
            torch.empty(count, kv_heads, dim, dtype=dtype),
        )
        keys, values, slots = torch.zeros_like(key), torch.zeros_like(key), torch.arange(count).flip(0)
        pool = keys, values, slots
        loops.rotate(given, None, None, EPS, (cos, sin), query, key, pool, gated=gated)
        written.append((query, key, keys, values))
    assert all(map(torch.equal, *written))
    attended, out = random(count, q_heads, dim, dtype=dtype), torch.empty(count, q_heads, dim, dtype=dtype)
    loops.gate_heads(rows, attended, out)
    assert_near(out, attended.double() * torch.sigmoid(queries[:, 1::2].double()))


def test_a_rows_result_does_not_depend_on_the_number_of_rows() -> None:
    rows, weight = random(40, 64, dtype=torch.bfloat16), random(64, dtype=torch.float32)
    together, alone = torch.empty_like(rows), torch.empty_like(rows)
    RowLoops(rows.dtype).rms_norm(rows, weight, EPS, together)
    for row in range(len(rows)):
        RowLoops(rows.dtype).rms_norm(rows[row : row + 1], weight, EPS, alone[row : row + 1])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_result_does_not_depend_on_its_address(dtype: torch.dtype) -> None:
    """Compiled loops take another branch if the memory that they write lies close behind the memory that they
    read."""
    width, size = 24, dtype.itemsize
    row, weight = random(1, width, dtype=dtype), random(width, dtype=torch.float32)
    gate_up = random(1, 2 * width, dtype=dtype, scale=3.0)
    memory = torch.zeros(2048, dtype=torch.uint8)

    def at(place: int, like: Tensor) -> Tensor:
        return memory[place : place + like.numel() * like.element_size()].view(like.dtype).view(like.shape)

    results: dict[str, set[bytes]] = {"norm": set(), "sum": set(), "silu": set(), "gelu": set()}
    loops = RowLoops(dtype)
    for gap in range(0, 512, size):
        there, weight_there, out = at(0, row), at(512, weight), at(512 + 4 * width + gap // 4 * 4, row)
        there.copy_(row), weight_there.copy_(weight)
        loops.rms_norm(there, weight_there, EPS, out)
        results["norm"].add(out.view(torch.uint8).numpy().tobytes())
        out = at(width * size + gap, row)
        loops.add(there, there, out)
        results["sum"].add(out.view(torch.uint8).numpy().tobytes())
        both, out = at(0, gate_up), at(2 * width * size + gap, row)
        for name, gate in (("silu", loops.silu_and_mul), ("gelu", loops.gelu_tanh_and_mul)):
            both.copy_(gate_up)
            gate(both, out)
            results[name].add(out.view(torch.uint8).numpy().tobytes())
    assert {name: len(found) for name, found in results.items()} == dict.fromkeys(results, 1)
