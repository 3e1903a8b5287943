"""Long names in few columns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.analysis.trace.tables import short_name, short_names

ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3> >"
    "(int, at::native::CUDAFunctor_add<float>)"
)
RELU = ADD.replace("CUDAFunctor_add", "BinaryFunctor")
FILL = ADD.replace("CUDAFunctor_add", "FillFunctor")


def test_what_tells_nothing_goes_first() -> None:
    assert short_name(ADD, 500) == ADD
    assert short_name(ADD, 80) == "vectorized_elementwise_kernel<4, CUDAFunctor_add<float>, Array<char*, 3> >"
    assert (
        short_name("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWork*)", 40) == "ncclKernel_AllReduce_RING_LL_Sum_float"
    )
    assert short_name("split_embedding_backward_codegen_exact_warp", 20) == "split_embeddi…t_warp"


@pytest.mark.parametrize("width", [20, 25, 34, 60])
def test_names_that_differ_in_their_middle_stay_apart(width: int) -> None:
    found = short_names([ADD, RELU, FILL, "gemm"], width)
    assert len(set(found)) == 4 and max(map(len, found)) <= width and found[3] == "gemm"
    assert [any(part in text for text in found) for part in ("CUDAF", "Binar", "FillF")] == [True] * 3


@given(st.lists(st.text("ab:<>(), _", min_size=1, max_size=60), max_size=8), st.integers(20, 60))
def test_any_names_fit_and_none_is_lost(names: list[str], width: int) -> None:
    found = short_names(names, width)
    assert len(found) == len(names) and all(len(text) <= width for text in found)
