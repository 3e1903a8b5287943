"""Shared by all tests: no network, one thread a process, and one line that says what was skipped and why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

REPO = Path(__file__).resolve().parent.parent
_skips: Counter[str] = Counter()


def shared(*parts: str) -> Path:
    """A file of the field's real data, which lies beside the project; the test skips where it is not there."""
    path = REPO.parent.joinpath("shared", "data", *parts)
    if not path.exists():
        pytest.skip("the folder with real data (../shared/data) is not here")
    return path


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    """Forty small alpaca rows."""
    path = tmp_path / "rows.json"
    write_rows(path, 40)
    return path


def write_rows(path: Path, n: int) -> None:
    """`n` instruction rows of uneven length."""
    rows = [
        {
            "instruction": f"Say the number {i}" + " please" * (i % 7),
            "input": "again" * (i % 3),
            "output": f"number {i} " + "yes " * (i % 5),
        }
        for i in range(n)
    ]
    path.write_text(json.dumps(rows))


def without_stdin(verb: str) -> subprocess.CompletedProcess[str]:
    """`allranks VERB -` where the caller has closed standard input."""
    command = ["bash", "-c", '"$0" -m allranks.cli.main "$1" - <&-', sys.executable, verb]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def tiny_spec(source: str | Path, tmp_path: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """A spec that trains in a second or two."""
    spec: dict[str, Any] = {
        "name": "t",
        "model": {
            "name": "tiny:mistral",
            "config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "vocab_size": 320,
            },
        },
        "data": {"source": str(source), "max_length": 64, "eval_fraction": 0.2},
        "adapter": {"type": "lora", "r": 4, "dropout": 0.1, "targets": ["q_proj", "v_proj"]},
        "train": {"max_steps": 6, "micro_batch_size": 2, "lr": 1e-2},
        "cluster": {"cache": str(tmp_path / "cache")},
        "run_root": str(tmp_path / "runs"),
    }
    for name, values in sections.items():
        spec[name] = {**spec.get(name, {}), **values} if isinstance(values, dict) else values
    return spec


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _skips[report.longrepr[2].removeprefix("Skipped: ")] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reasons = "; ".join(f"{n} x {why}" for why, n in _skips.items()) or "nothing"
    terminalreporter.write_line(f"skipped: {reasons}")


# Of tests with many cases of one kind the usual run takes these; `make test-all` takes them all. Nothing: the whole test.
USUAL: dict[str, set[str]] = {
    "test_planted_bugs_are_caught": {
        "reduces_the_parameter", "shard_boundary_off_by_one", "adapters_not_averaged", "trainer_mean_loss", "each_step_taken_for_the_last",
    },
    "test_a_trainer_that_would_train_apart_is_refused": {"trainer_same_rows-ProofFailed-rank 1 and rank 0 both trained", "none-None-None"},
    "test_files_give_what_transformers_gives": {"False-2", "True-3"},
    "test_tied_weights_fused_experts_and_other_dtypes": {"bfloat16"},
    "test_a_part_that_went_astray_is_seen": {"other_rows"},
    "test_weights_of_another_layer_would_be_seen_here": set(),
    "test_a_bug_in_reading_would_be_seen": {"copies_not_filled-deepspeed_zero2-how1"},
    "test_padding_taken_for_weights_would_be_seen": set(),
    "test_adapters_of_experts_and_what_is_on_the_host_too": {"moments_on_host"},
    "test_ctrl_c_while_a_rank_is_deaf": set(),
    "test_states_on_the_host_and_adapters_of_experts_go_on_too": set(),
    "test_memory_that_is_kept_would_be_seen": set(),
    "test_a_skip_that_does_not_last_would_be_seen": set(),
    "test_blocks_that_are_never_freed_would_be_seen": set(),
    "test_moments_that_belong_elsewhere_would_be_seen": set(),
    "test_a_classifier_equals_pytorch_ddp": set(),
    "test_a_planted_fault_turns_its_criterion_red": {"missing_rank"},
    "test_a_smoke_test_of_the_notes_on_one_machine": set(),  # the ladder runs the same
    "test_compare_measures_it_with_all_gates": set(),
    "test_a_stopped_run_goes_on_as_if_nothing_had_been": set(),
    "test_three_nodes_with_differing_interfaces_and_names_on_loopback": set(),
    "test_a_port_that_is_taken_is_left_to_its_owner": set(),
    "test_a_restarted_controller_and_two_jobs_at_once_do_no_harm": set(),
    "test_a_stop_that_is_asked_before_the_ranks_are_there_ends_nothing": set(),
    "test_an_optimizer_in_the_json_is_used_and_equals_ours": set(),
    "test_a_resumed_run_is_bitwise_one_that_never_stopped": set(),  # so are those that are ended at random steps
    "test_a_run_in_parts_from_a_folder_equals_a_plain_one": set(),
    "test_a_sharded_run_saves_what_a_plain_one_would_and_goes_on": set(),
    "test_a_model_trained_whole_is_exported_without_our_state": set(),
    "test_arguments_that_are_free_reach_the_trainer_and_others_are_refused_by_plan": set(),
    "test_a_checkpoint_that_was_refused_is_the_saves_fault": set(),
    "test_reductions_after_backward_are_not_launched_in_it": set(),
    "test_what_was_there_before_does_not_show_not_even_in_weights_that_stage_3_keeps_whole": set(),
    "test_live_tensors_are_as_many_as_estimated": {"pytorch_zero3-more3"},
    "test_a_deepspeed_that_cannot_be_imported_ends_with_3_and_the_cure": {
        "ImportError('libcudart.so.11.0: cannot open shared object file')-libcudart.so.11.0",
    },
    "test_what_only_the_ranks_can_find_is_said_as_clearly": {
        "change3-3-no-such-org/no-such-model",
    },
    "test_the_time_limit_leads_to_a_requeue_and_an_exact_continuation": set(),  # a killed node sends it back to the queue, too
    "test_a_second_run_at_the_same_place_is_refused_and_the_first_goes_on": set(),
    "test_a_run_that_broke_off_has_one_red_line": set(),
    "test_lite_checkpoints_resume_only_when_told_so": set(),
    "test_deepspeed_and_others_read_what_each_other_wrote": set(),
    "test_a_rank_that_is_deaf_is_ended_with_the_others": set(),
    "test_going_on_from_a_saved_state_is_bitwise_as_if_there_had_been_no_stop": set(),
    "test_an_adapter_of_which_one_ranks_part_was_saved_would_be_seen": set(),
    "test_gradients_are_reduced_within_the_backward_range_of_the_last_micro_step": set(),  # test_trace_gloo shows it, too
    "test_reductions_in_hooks_are_launched_in_backward_and_only_there": {"ddp"},
    "test_only_the_named_ranks_are_profiled_and_the_numbers_stay_the_same": set(),
}  # fmt: skip


def _how_late(item: pytest.Item) -> int:
    """The cluster's tests, which go one by one, and whole runs begin early, or they would be left over at the end."""
    return next((i for i, folder in enumerate(("cluster", "dist")) if folder in item.path.relative_to(REPO).parts), 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Any, log: Any) -> Any:
    from tests.scheduling import make  # needs xdist, without which nobody calls this

    return make(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_how_late)
    for item in items:
        name = getattr(item, "originalname", item.name)
        case = item.callspec.id if hasattr(item, "callspec") else ""
        if name in USUAL and case not in USUAL[name]:
            item.add_marker(pytest.mark.full)
