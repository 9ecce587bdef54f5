"""The Triton mixture of experts and its routing compute what plain torch computes, whatever was chosen."""

import pytest
import torch
from cases import tolerance

from tokenmill.ops import reference

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("triton_device", "poisoned_memory")
# The interpreter's dot takes bfloat16 for integers.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if torch.cuda.is_available() else [])


def mixture(tokens, k, experts=6, hidden=48, inner=40, dtype=torch.float32, device="cpu", seed=0):
    """Arguments of the moe op; `experts` are chosen at random, differently for each place of a token."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=generator) * scale).to(device, dtype)

    chosen = torch.rand(tokens, experts, generator=generator).topk(k, dim=-1).indices
    return {
        "x": randn(tokens, hidden),
        "weights": torch.rand(tokens, k, generator=generator).to(device),
        "experts": chosen.to(device),
        "gate_up": randn(experts, 2 * inner, hidden, scale=hidden**-0.5),
        "down": randn(experts, hidden, inner, scale=inner**-0.5),
        "kind": "silu",
    }


def expected(case):
    """The reference in float64, so that only the op's own rounding is measured."""
    floats = ("x", "weights", "gate_up", "down")
    return reference.moe(**case | {name: case[name].double() for name in floats})


def check(got, case):
    dtype = case["x"].dtype
    torch.testing.assert_close(got, expected(case).to(dtype), **tolerance(dtype))


def both_ways(case):
    """The op's result for few tokens (where they are few) and for many, whatever it would choose itself."""
    from tokenmill.ops.triton.moe import experts as moe
    from tokenmill.ops.triton.moe import few as moe_few
    from tokenmill.ops.triton.moe import grouped as moe_grouped

    dtype = case["x"].dtype
    if case["x"].shape[0] <= 6:
        yield moe_few.few(**case, launch=(moe_few.FewTile(16, 4), moe_few.FewTile(8, 4)))
    for launch in {moe.shapes(choices_per_expert, dtype): None for choices_per_expert in (4, 16, 40, 100)}:
        yield moe.grouped(**case, launch=launch)
    for block_m in (16, 128):
        bulk = moe_grouped.ExpertTile(block_m, 64, 64, 4, 2, 2, bulk=True)
        yield moe.grouped(**case, launch=(bulk, bulk))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens,k", [(1, 1), (1, 6), (5, 2), (23, 3), (45, 4)])
def test_moe_equals_reference_on_random_routings(tokens, k, dtype, triton_device):
    case = mixture(tokens, k, dtype=dtype, device=triton_device, seed=tokens)
    for got in both_ways(case):
        check(got, case)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    "tokens,k,experts,hidden,inner", [(5, 2, 6, 128, 192), (700, 4, 6, 256, 64), (900, 1, 3, 64, 320)]
)
def test_the_products_for_hopper_equal_the_reference(tokens, k, experts, hidden, inner, kind, triton_device):
    from tokenmill.ops.triton.moe import experts as moe

    case = mixture(tokens, k, experts, hidden, inner, torch.bfloat16, triton_device, tokens) | {"kind": kind}
    if not moe.hopper_fits(case["x"], case["gate_up"], case["down"]):
        pytest.skip("not a Hopper GPU")
    check(moe.grouped(**case, launch=None), case)
    case["experts"] = case["experts"] // 2  # groups of very different lengths, some empty
    check(moe.grouped(**case, launch=None), case)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_both_activations(kind, triton_device):
    case = mixture(3, 2, device=triton_device) | {"kind": kind}
    for got in both_ways(case):
        check(got, case)


@pytest.mark.parametrize("tokens,expert", [(4, 0), (20, 5)])
def test_all_tokens_may_go_to_one_expert(tokens, expert, triton_device):
    case = mixture(tokens, 1, device=triton_device)
    case["experts"].fill_(expert)
    for got in both_ways(case):
        check(got, case)


@pytest.mark.parametrize("tokens", [4, 20])
def test_experts_that_nobody_chose_are_not_read(tokens, triton_device):
    case = mixture(tokens, 2, experts=8, device=triton_device)
    case["experts"] = torch.tensor([[1, 6], [6, 3]], device=triton_device).repeat(tokens // 2, 1)
    right = expected(case)
    for name in ("gate_up", "down"):
        case[name][[0, 2, 4, 5, 7]] = float("nan")
    for got in both_ways(case):
        torch.testing.assert_close(got, right.float(), **tolerance(torch.float32))


@pytest.mark.parametrize("tokens", [4, 20])
def test_a_token_with_nan_spoils_no_other_token(tokens, triton_device):
    case = mixture(tokens, 2, device=triton_device)
    case["x"][1] = float("nan")
    others = [token for token in range(tokens) if token != 1]
    right = expected(case)
    for got in both_ways(case):
        assert got[1].isnan().all()
        torch.testing.assert_close(got[others], right[others].float(), **tolerance(torch.float32))


@pytest.mark.parametrize("hidden,inner", [(128, 64), (200, 24), (16, 130), (2064, 16)])
def test_sizes_need_not_be_multiples_of_blocks(hidden, inner, triton_device):
    case = mixture(3 if hidden < 2048 else 1, 2, experts=5, hidden=hidden, inner=inner, device=triton_device)
    for got in both_ways(case):
        check(got, case)


def test_tokens_may_be_a_slice_of_a_wider_tensor(triton_device):
    case = mixture(5, 2, device=triton_device)
    wide = torch.full((5, 100), float("nan"), device=triton_device)
    wide[:, 10:58] = case["x"]
    case["x"] = wide[:, 10:58]
    for got in both_ways(case):
        check(got, case)


@pytest.mark.parametrize("tokens", [0, 1, 9, 40])
def test_the_op_takes_any_number_of_tokens(tokens, triton_device):
    from tokenmill.ops.triton.moe import experts as moe

    case = mixture(tokens, 2, device=triton_device)
    check(moe.moe(**case), case)


def test_an_unknown_activation_is_refused(triton_device):
    from tokenmill.ops.triton.moe import experts as moe

    with pytest.raises(ValueError, match="relu"):
        moe.moe(**mixture(2, 1, device=triton_device) | {"kind": "relu"})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("tokens,k,experts", [(1, 1, 1), (3, 2, 4), (30, 8, 30), (130, 4, 5), (90, 3, 33)])
def test_groups_hold_every_choice_once_in_tiles_of_one_expert(tokens, k, experts, dtype, triton_device, monkeypatch):
    from tokenmill.ops.triton.moe import route as moe_route
    from tokenmill.ops.triton.moe.route import group_by_expert

    # The two larger cases are cut into chunks, which then have to grow.
    for name, value in {"_ONE_CHUNK": 256, "_CHUNK": 32, "_MAX_CHUNKS": 8}.items():
        monkeypatch.setattr(moe_route, name, value)
    generator = torch.Generator().manual_seed(tokens)
    skewed = torch.rand(tokens, experts, generator=generator) * torch.linspace(0.3, 1, experts)
    chosen = skewed.topk(min(k, experts), dim=-1).indices.to(triton_device, dtype)
    for block_m in (16, 128):
        groups = group_by_expert(chosen, experts, block_m)
        flat = chosen.flatten()
        assert torch.equal(groups.order.long(), flat.argsort(stable=True))
        covered = []
        for expert, first, end, _ in groups.tiles.tolist():
            rows = range(first, min(first + block_m, end))
            assert all(flat[groups.order[row].long()] == expert for row in rows)
            covered += rows
        assert covered == list(range(flat.numel()))


def routed(scores, top_k, normalize=False, scale=1.0):
    from tokenmill.ops.triton.moe.route import choose

    return choose(scores[None], top_k, normalize, scale)


@pytest.mark.parametrize("tokens,experts,hidden", [(9, 33, 130), (40, 20, 520), (600, 20, 300)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_router_scores_are_as_precise_as_float32(tokens, experts, hidden, dtype, triton_device):
    from tokenmill.ops.triton.moe.scores import router_scores, split_scores

    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator).to(triton_device, dtype)
    router = torch.randn(experts, hidden, generator=generator).to(triton_device)
    for way in [router_scores] + [split_scores] * (dtype != torch.float32):
        exact = (x.double() @ router.double().T).float()
        torch.testing.assert_close(way(x, router).sum(0), exact, rtol=2e-5, atol=4e-5)


def test_parts_of_scores_are_added_before_experts_are_chosen(triton_device):
    from tokenmill.ops.triton.moe.route import choose

    parts = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1)).to(triton_device) * 3
    best, indices = parts.double().sum(0).softmax(-1).topk(4, dim=-1)
    weights, chosen = choose(parts, 4, False, 1.0)
    assert torch.equal(chosen.long(), indices)
    torch.testing.assert_close(weights, best.float(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "tokens,experts,hidden,top_k", [(1, 10, 48, 4), (8, 33, 130, 3), (2, 3, 2100, 3), (20, 12, 64, 2)]
)
def test_the_op_routes_any_number_of_tokens_and_leaves_no_trace(tokens, experts, hidden, top_k, dtype, triton_device):
    from tokenmill.ops.triton.moe.route import route

    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(tokens, 2 * hidden, generator=generator).to(triton_device, dtype)[:, :hidden]
    router = torch.randn(experts, hidden, generator=generator).to(triton_device) * 0.1
    best, indices = (x.double() @ router.double().T).softmax(-1).topk(top_k, dim=-1)
    for _ in range(2):
        weights, chosen = route(x, router, top_k, True, 2.5)
        assert torch.equal(chosen.long(), indices)
        torch.testing.assert_close(weights, (2.5 * best / best.sum(-1, keepdim=True)).float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("tokens,experts,top_k", [(1, 128, 8), (5, 60, 4), (3, 8, 8), (2, 1, 1), (530, 20, 3)])
@pytest.mark.parametrize("normalize,scale", [(False, 1.0), (True, 2.5)])
def test_routing_equals_torch(tokens, experts, top_k, normalize, scale, triton_device):
    scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(experts)).to(triton_device) * 3
    weights, chosen = routed(scores, top_k, normalize, scale)
    best, indices = scores.double().softmax(-1).topk(top_k, dim=-1)
    if normalize:
        best = best / best.sum(-1, keepdim=True)
    assert torch.equal(chosen.long(), indices)
    torch.testing.assert_close(weights, (best * scale).float(), rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_first_are_chosen(triton_device):
    scores = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0, 1.0], [0.0] * 6, [-1e9, 0.0, -1e9, -1e9, -1e9, -1e9]])
    _, chosen = routed(scores.to(triton_device), 4)
    assert chosen.tolist() == [[1, 3, 4, 2], [0, 1, 2, 3], [1, 0, 2, 3]]


def test_scores_that_are_not_numbers_still_name_different_experts(triton_device):
    scores = torch.randn(2, 10).to(triton_device)
    scores[0, 3] = float("nan")
    weights, chosen = routed(scores, 3, normalize=True)
    assert weights[0].isnan().all() and not weights[1].isnan().any()
    assert len(set(chosen[0].tolist())) == 3 and all(0 <= expert < 10 for expert in chosen[0].tolist())


def test_both_ops_may_be_recorded(triton_device):
    from tokenmill.ops.triton import IMPLEMENTATIONS

    assert {one.op for one in IMPLEMENTATIONS if one.capture_safe} >= {"moe", "route"}
