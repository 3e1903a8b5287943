"""``model.attention: auto``: only kernels that compute the same are timed, the fastest is used, a resume keeps it."""

from typing import Any

import pytest
import torch

from allranks.errors import EnvironmentNotAble
from allranks.train.distributed import SINGLE_PROCESS
from allranks.train.models import attention_trial, packed_attention
from allranks.train.models.attention_trial import Candidate, choose_attention, remark_of
from allranks.train.models.packed_attention import RowMask, attention_row_by_row
from tests.unit.test_packed_attention import assert_as_single_rows, packed_batch, packed_model


def choose(model: Any, *, isolated: bool, earlier: str | None = None) -> Any:
    how: dict[str, Any] = {"isolated": isolated, "earlier": earlier}
    return choose_attention(SINGLE_PROCESS, model.model, torch.float32, packed_batch(), **how)


@pytest.fixture(autouse=True)
def released(monkeypatch: pytest.MonkeyPatch) -> Any:
    usual = packed_attention.use_kernel
    with attention_trial.ExitStack() as kept:
        monkeypatch.setattr(attention_trial, "_kept", kept)
        yield
    usual(None)


@pytest.mark.parametrize("isolated", [True, False])
def test_the_fastest_that_computes_the_same_is_used(monkeypatch: pytest.MonkeyPatch, isolated: bool) -> None:
    model, calls = packed_model(), []

    def counted(q: Any, k: Any, v: Any, mask: RowMask, scale: float | None) -> torch.Tensor:
        calls.append(len(q))
        return attention_row_by_row(q, k, v, mask, scale)

    def mixes(q: Any, k: Any, v: Any, mask: RowMask, scale: float | None) -> torch.Tensor:
        return counted(q, k, v, mask, scale) + 1e-5 * v.mean()  # less than the tolerance

    def absent() -> Any:
        raise ImportError("No module named 'flash_attn_interface'")

    more = [Candidate("mine", lambda: counted), Candidate("mixes", lambda: mixes), Candidate("absent", absent)]
    usual = attention_trial.candidates
    monkeypatch.setattr(attention_trial, "candidates", lambda *a, **k: [*usual(*a, **k), *more])
    real = choose(model, isolated=isolated)  # with real times
    names = [t["name"] for t in real["tried"]]
    assert names == [*(["rows", "rows.math"] if isolated else ["sdpa", "sdpa.math"]), "mine", "mixes", "absent"]
    assert [t["seconds"] is not None and t["seconds"] > 0 for t in real["tried"]] == [True, True, True, False, False]
    assert real["tried"][3]["problem"] == "the output of a row changes with its neighbours"
    assert "mixes the output of a row changes" in remark_of(real) and "absent ImportError: No module" in remark_of(real)
    assert real["shape"] == [2, 4, 2, 24, 8]
    times = {"mine": 1.0, names[0]: 1.02}
    monkeypatch.setattr(attention_trial, "_seconds", lambda c, *_: times.get(c.name, 2.0))
    assert choose(model, isolated=isolated)["chosen"] == names[0]  # 2 % are noise
    times[names[0]] = 1.1
    assert choose(model, isolated=isolated)["chosen"] == "mine"
    if isolated:
        calls.clear()
        assert_as_single_rows(model)
        assert calls == [2] * model.model.config.num_hidden_layers
    monkeypatch.setattr(attention_trial, "_seconds", lambda *_: pytest.fail("timed again"))
    again = choose(model, isolated=isolated, earlier=names[1])
    assert (again["chosen"], again["reused"]) == (names[1], True)
    with pytest.raises(EnvironmentNotAble, match=r"absent, which the run has used, .*flash_attn_interface"):
        choose(model, isolated=isolated, earlier="absent")
    with pytest.raises(EnvironmentNotAble, match=r"varlen.FA3, .*not known here"):
        choose(model, isolated=isolated, earlier="varlen.FA3")
