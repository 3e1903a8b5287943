"""What names tell, and arithmetic on spans of time."""

import random

import pytest

from allranks.analysis.trace import events, intervals


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)", "all_reduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "all_gather"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "all_reduce"),
        ("ncclSymkDevKernel_AllReduce_AGxLL_R_sum_f32", "all_reduce"),
        ("rcclGenericKernel(ncclDevComm*, unsigned long, ncclWork*) [clone .kd]", None),
        ("void multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", "all_reduce"),
        ("void vllm::cross_device_reduce_1stage<half, 8>(vllm::RankData*)", "reduce"),
    ],
)
def test_communication_kernels_of_all_ages(kernel: str, kind: str | None) -> None:
    assert events.is_comm_kernel(kernel)
    assert events.collective_kind_of_kernel(kernel) == kind


@pytest.mark.parametrize(
    "kernel",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(float)",
        "void cub::DeviceReduceKernel<float>()",
        "sm90_xmma_gemm_bf16bf16_bf16f32",
        "void at::native::vectorized_gather_kernel<16, long>(char*)",
    ],
)
def test_kernels_that_only_sound_alike_are_compute(kernel: str) -> None:
    assert not events.is_comm_kernel(kernel)


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ("_allgather_base", "all_gather"), ("c10d::_reduce_scatter_base_", "reduce_scatter"),
        ("_c10d_functional::all_gather_into_tensor_coalesced", "all_gather"), ("all_to_allv", "all_to_all"),
        ("c10d::recv_", "recv"), ("c10d::reduce_", "reduce"), ("gloo:barrier", "barrier"), ("wait", None),
    ],
)  # fmt: skip
def test_kinds(told: str, kind: str | None) -> None:
    assert events.collective_kind(told) == kind


SIZES = {
    1: ("unsigned char", "Bool", "Float8_e4m3fn", "c10::Float8_e5m2"),
    2: ("BFloat16", "c10::BFloat16", "c10::Half"),
    4: ("Float",),
    8: ("long int", "long", "double", "c10::complex<float>"),
    None: ("TensorList", ""),
}


@pytest.mark.parametrize(("dtype", "size"), [(dtype, size) for size, dtypes in SIZES.items() for dtype in dtypes])
def test_sizes_of_elements(dtype: str, size: int | None) -> None:
    assert events.element_bytes(dtype) == size


def test_bus_bandwidth_factors_are_those_of_nccl_tests() -> None:
    assert events.bus_factor("all_reduce", 8) == pytest.approx(2 * 7 / 8)
    assert events.bus_factor("all_gather", 8) == events.bus_factor("reduce_scatter", 8) == pytest.approx(7 / 8)
    assert events.bus_factor("broadcast", 8) == 1.0


# arithmetic on spans, against sets of points


def points(spans: list[intervals.Span]) -> set[int]:
    return {p for a, b in spans for p in range(int(a), int(b))}


def spans(rng: random.Random, n: int) -> list[intervals.Span]:
    found = [(a := rng.randrange(60), a + rng.randrange(0, 12)) for _ in range(n)]
    return [(float(a), float(b)) for a, b in found]


@pytest.mark.parametrize("seed", range(40))
def test_union_difference_intersection_and_clipping_are_those_of_sets(seed: int) -> None:
    rng = random.Random(seed)
    one, other = spans(rng, rng.randrange(9)), spans(rng, rng.randrange(9))
    a, b = intervals.merge(one), intervals.merge(other)
    assert points(a) == points(one)
    assert all(a[i][1] < a[i + 1][0] for i in range(len(a) - 1)), "touching spans are one"
    assert points(intervals.subtract(a, b)) == points(one) - points(other)
    assert points(intervals.intersect(a, b)) == points(one) & points(other)
    low, high = sorted((rng.randrange(70), rng.randrange(70)))
    assert points(intervals.clip(a, low, high)) == points(one) & set(range(low, high))
    assert intervals.total_length(a) == len(points(one))


def test_of_labels_over_one_another_the_latest_begun_holds() -> None:
    found = intervals.flatten([(0, 100, 1), (10, 20, 2), (15, 30, 3), (50, 50, 4)])
    assert found == [(0, 10, 1), (10, 15, 2), (15, 30, 3), (30, 100, 1)]
    lookup = intervals.SegmentIndex(found)
    assert [lookup.at(t) for t in (-1, 0, 12, 15, 29.9, 30, 100)] == [-1, 1, 2, 3, 3, 1, -1]
