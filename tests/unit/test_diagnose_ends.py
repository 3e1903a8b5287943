"""How a log ends: completion, progress, an interrupt, values that stay non-finite, a signal alone, and what only looks like an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from allranks.analysis.diagnose import Diagnosis, diagnose

STEPS = "\n".join(f"step {n}/900 loss 1.{n}" for n in range(20, 30))
TABLE = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
Root Cause (first observed failure):
[0]:
  time      : 2025-02-04_03:04:05
  host      : node-d
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 7120)
  traceback : Signal {number} ({name}) received by PID 7120"""


def of(tmp_path: Path, text: str) -> Diagnosis:
    path = tmp_path / "a.log"
    path.write_text(text + "\n")
    return diagnose([path])


def answer(found: Diagnosis) -> tuple[str, list[str]]:
    return found.verdict, [f.id for f in found.findings]


INTERRUPTS = (
    "[2026-01-02 10:00:00,123] [INFO] [launch.py:319:sigkill_handler] Main process received SIGINT, exiting",
    'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\nKeyboardInterrupt',
    "KeyboardInterrupt: ",
    "^CTraceback (most recent call last):",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 77 got signal: 2",
    "W0102 10:00:00.1 77 torch/distributed/elastic/agent/server/api.py:741] Received Signals.SIGINT death signal, shutting down workers",
    "Detected KeyboardInterrupt, attempting graceful shutdown ...",
    "INFO: interrupted by user, saving a last checkpoint",
    "Received Ctrl-C, stopping after this step",
    "User interrupted the training",
    "Received signal 2, terminating",
    "W0102 10:00:00.1 77 torch/distributed/elastic/agent/server/api.py:741] Received 2 death signal, shutting down workers",
    "srun: Cancelled pending job step with signal 2",
    "make: *** [train] Interrupt",
    "Exception ignored in: <function Loader.__del__>\nTraceback (most recent call last):\nKeyboardInterrupt: \n"
    "^CTraceback (most recent call last):\nKeyboardInterrupt: ",
    "srun: error: node-b: task 3: Interrupt",
    "[2026-01-02 10:00:00,123] [ERROR] [launch.py:321:sigkill_handler] ['python', 'x'] exits with return code = -2",
)


@pytest.mark.parametrize("line", INTERRUPTS)
@pytest.mark.parametrize("after", ["", "\nSaved the final model to out/last.pt\nTraining finished"])
def test_an_interrupt_by_the_user_is_a_cancellation_and_never_healthy(tmp_path: Path, line: str, after: str) -> None:
    assert answer(of(tmp_path, f"{STEPS}\n{line}{after}")) == ("found", ["slurm_cancelled"])


@pytest.mark.parametrize(
    "line",
    [
        "Uvicorn running on http://0.0.0.0:8000 (Press CTRL+C to quit)",
        "the signal handler for SIGINT is set",
        "use Ctrl-C to stop the run; a KeyboardInterrupt handler saves the state",
    ],
)
def test_how_to_interrupt_is_no_interrupt(tmp_path: Path, line: str) -> None:
    assert answer(of(tmp_path, f"{line}\n{STEPS}")) == ("healthy", [])


def _steps(form: str, values: list[str]) -> str:
    return "\n".join(form.format(n=100 + n, v=value) for n, value in enumerate(values))


NON_FINITE = (
    "iteration {n}/ 5000 | elapsed time per iteration (ms): 412.9 | loss scale: 1.0 | grad norm: {v} | number of nan iterations: 0 |",
    "{{'loss': 0.0, 'grad_norm': {v}, 'learning_rate': 1e-05, 'epoch': 0.{n}}}",
    "2026-01-02 10:00:00 | INFO | train | epoch 1 step {n} loss: {v} tokens/s 900",
    "step {n} | lm loss: {v} | lr 1e-4",
    "Epoch 1:  20%|##        | {n}/900 [00:10<01:00, 9.5it/s, v_num=0, train_loss={v}]",
    "iter {n}: loss {v}, time 20.11ms",
    "epoch {n} train_loss {v} val_loss 1.2",
    "[INFO] iteration {n} lr: 1e-4 loss: tensor({v}, device='cuda:0')",
    "step {n} loss: 0.3 gradient_norm={v} samples/s 3",
)


@pytest.mark.parametrize("form", NON_FINITE)
def test_values_that_stay_non_finite_are_a_finding(tmp_path: Path, form: str) -> None:
    good, bad = ["1.5"] * 6, ["nan"] * 6
    assert answer(of(tmp_path, _steps(form, good))) == ("healthy", [])
    assert answer(of(tmp_path, _steps(form, good + bad))) == ("found", ["loss_not_finite"])
    assert answer(of(tmp_path, _steps(form, bad + good))) == ("healthy", [])
    assert answer(of(tmp_path, _steps(form, good + bad) + "\nTraining completed")) == ("found", ["loss_not_finite"])


def test_values_that_stay_non_finite_are_a_finding_beside_other_progress(tmp_path: Path) -> None:
    lines = [f"step {n} loss nan\nstep={n}, skipped=0, lr=[1e-05]\nglobal_step={n} samples/s 3.1" for n in range(9)]
    assert answer(of(tmp_path, "\n".join(lines))) == ("found", ["loss_not_finite"])


@pytest.mark.parametrize(
    "line",
    [
        "Loss is nan, stopping training",
        "ERROR: Non-finite loss detected at step 30, aborting",
        "AssertionError: Rank 0: found NaN in local forward loss calculation",
        "FloatingPointError: loss became infinite",
    ],
)
def test_a_program_that_ends_for_a_non_finite_value(tmp_path: Path, line: str) -> None:
    assert answer(of(tmp_path, f"{STEPS}\n{line}"))[1][:1] == ["loss_not_finite"]


@pytest.mark.parametrize(
    "line",
    [
        "check_for_nan_in_loss: True",
        "checking for nan loss is enabled",
        "nan_grads: 0 inf_grads: 0",
        "number of nan iterations: 0",
    ],
)
def test_settings_and_counts_of_non_finite_values_are_no_values(tmp_path: Path, line: str) -> None:
    assert answer(of(tmp_path, f"{line}\n{STEPS}\n{line}")) == ("healthy", [])


def test_an_infinite_gradient_norm_now_and_then_is_loss_scaling(tmp_path: Path) -> None:
    form = "step {n} loss 2.1 grad_norm: {v}"
    assert answer(of(tmp_path, _steps(form, ["inf", "inf", *["1.0"] * 30]))) == ("healthy", [])
    assert answer(of(tmp_path, _steps(form, ["1.0"] * 30 + ["inf"]))) == ("healthy", [])
    assert answer(of(tmp_path, _steps(form, ["1.0"] * 9 + ["inf"] * 9))) == ("found", ["loss_not_finite"])


@pytest.mark.parametrize(
    "text",
    [
        TABLE.format(code=-6, number=6, name="SIGABRT"),
        "[E ProcessGroupNCCL.cpp:414] Some NCCL operations have failed\nterminate called after throwing an instance of 'std::runtime_error'\n"
        "  what():  something that nobody knows\n" + TABLE.format(code=-6, number=6, name="SIGABRT"),
        "job.sh: line 9: 4711 Aborted                 (core dumped) python train.py",
        "srun: error: node-b: task 3: Aborted (core dumped)",
    ],
)
def test_an_abort_without_its_reason_is_unexplained(tmp_path: Path, text: str) -> None:
    assert answer(of(tmp_path, text)) == ("unexplained", [])


def test_a_crash_signal_alone_is_an_unsure_finding(tmp_path: Path) -> None:
    alone = of(tmp_path, TABLE.format(code=-11, number=11, name="SIGSEGV"))
    (finding,) = alone.findings
    assert (finding.id, finding.rank, finding.host) == ("rank_died", 3, "node-d")
    assert finding.confidence <= 0.5
    assert any("only the signal" in text for text in finding.against)
    stack = 'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File "ext.py", line 7 in call\n'
    told = of(tmp_path, stack + TABLE.format(code=-11, number=11, name="SIGSEGV")).findings[0]
    assert (told.id, told.against) == ("rank_died", [])
    assert told.confidence > 0.7


@pytest.mark.parametrize(
    "line",
    [
        "[default1]:  what():  CUDA error: unknown error",
        "RuntimeWorker: HIP error: unknown",
        "(Worker pid=7) [2026-01-02 10:00:00,227 E 7 9] logging.cc:97: Unhandled exception: St9exception. what(): the collective failed",
        "Exception raised from operator() at /src/backend/process_group_xyz.cpp:286 (most recent call first):",
        "libc++abi: terminating due to uncaught exception of type std::bad_function_call",
        "python: queue.c:2617: push: Assertion `x' failed.",
        "UR backend failed. UR backend returns:39",
        "synStatus 26: HCL collective call returned error",
        "[2026-01-02 10:00:00.1][HABANA] synLaunch call failed with status 26",
        "E0102 16:59:05.121 77 site-packages/torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: ",
    ],
)
def test_errors_of_a_device_or_its_library_are_failures(tmp_path: Path, line: str) -> None:
    assert answer(of(tmp_path, line)) == ("unexplained", [])
    assert answer(of(tmp_path, f"{STEPS}\n{line}")) == ("unexplained", [])


@pytest.mark.parametrize(
    "line",
    [
        'n1:7:7 [0] /build/rccl/init.cc:120 NCCL WARN Missing "iommu=pt" from kernel command line which can lead to system instablity or hang!',
        'n1:7:7 [0] /build/rccl/init.cc:126 NCCL WARN Missing "HSA_FORCE_FINE_GRAIN_PCIE=1" from environment which can lead to low performance',
        "n1:7:7 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
        "n1:7:7 [0] misc/cudawrap.cc:36 NCCL WARN Failed to find CUDA library libcuda.so in /usr/lib",
        "slurmstepd: error: couldn't chdir to `/home/u/work': No such file or directory: going to /tmp instead",
        "slurmstepd: error: Unable to get the home directory of user: using / instead",
        "n1:7:7 [0] NCCL WARN NET/IB : Unable to open device rocep1 - ignoring",
        "n1:7:7 [0] NCCL WARN Could not get NUMA node, performance might be reduced",
        "libibverbs: Warning: couldn't load driver 'libxy.so': libxy.so: cannot open shared object file: No such file or directory",
        "2026-01-02 10:00:00.1: E external/xla/cuda_fft.cc:477] Unable to register cuFFT factory: one has already been registered",
        "error: XDG_RUNTIME_DIR not set in the environment.",
        "fatal: not a git repository (or any of the parent directories): .git",
        "ERROR: ld.so: object 'libx.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.",
        "slurmstepd: error: pyxis: [WARN] container-cli: no devices",
        "INFO: init_process_group: rendezvous at tcp://n1:29500, timeout: 0:30:00",
        "INFO waiting for all workers, rdzv timeout is 600",
        "  rdzv_configs     : {'timeout': 900}",
        "init_process_group(backend='nccl', timeout=1800)",
        "Namespace(rdzv_backend='c10d', rdzv_timeout=600, ddp_timeout=1800)",
    ],
)
def test_remarks_at_the_start_are_no_failures(tmp_path: Path, line: str) -> None:
    start = "n1:7:7 [0] NCCL INFO Bootstrap : Using eno1:10.4.0.12<0>"
    assert answer(of(tmp_path, f"{start}\n{line}\n{start}")) == ("incomplete", [])
    assert answer(of(tmp_path, f"{line}\n{STEPS}")) == ("healthy", [])


@pytest.mark.parametrize(
    "line",
    [
        "ERROR rendezvous timed out: 3 of 4 nodes joined",
        "RuntimeError: rendezvous timeout after 600 seconds",
        "rendezvous timeout: no answer",
    ],
)
def test_a_rendezvous_that_timed_out_is_no_setting(tmp_path: Path, line: str) -> None:
    assert answer(of(tmp_path, f"{line}\nsrun: error: n1: task 0: Exited with exit code 1")) == (
        "found",
        ["rendezvous_unreachable"],
    )


def test_a_folder_that_slurm_replaced_counts_beside_a_failure(tmp_path: Path) -> None:
    moved = "slurmstepd: error: couldn't chdir to `/tmp/u/work': No such file or directory: going to /tmp instead"
    assert answer(of(tmp_path, f"{moved}\nsrun: error: n1: task 0: Exited with exit code 2")) == (
        "found",
        ["script_not_found"],
    )


def test_tear_down_after_an_ignored_exception_is_unexplained(tmp_path: Path) -> None:
    text = """Exception ignored in: <function Recorder.__del__ at 0x7f00>
Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/rec/core.py", line 41, in __del__
    assert self.open
AssertionError:
E0102 16:59:05.121000 652226 site-packages/torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 0"""
    assert answer(of(tmp_path, text)) == ("unexplained", [])
    assert answer(of(tmp_path, "\n".join(text.split("\n")[:-1]))) == ("incomplete", [])


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("node-f:5:9 [0] ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed with error Bad address", "memlock_limit"),
        (
            "node-f:5:9 [0] ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
            "memlock_limit",
        ),
        (
            "ucp_mm.c:150 UCX  ERROR failed to register address 0x7f length 4096 on mlx5_0: Cannot allocate memory",
            "memlock_limit",
        ),
        (
            "Last error:\n[rank4]: Call to ibv_reg_dmabuf_mr failed with error Cannot allocate memory errno 12",
            "memlock_limit",
        ),
        ("UCX  ERROR mlx5_1: ibv_create_cq(cqe=4096) failed: Cannot allocate memory", "memlock_limit"),
        ("libfabric:7:1:efa:mr:efa_mr_reg_impl():1<warn> Unable to register MR: ENOMEM", "memlock_limit"),
    ],
)
def test_memory_that_cannot_be_registered_is_the_limit(tmp_path: Path, line: str, wanted: str) -> None:
    assert of(tmp_path, line).findings[0].id == wanted


SAVE = """Traceback (most recent call last):
  File "/work/train.py", line 227, in main
    torch.save(state, path)
  File "/env/lib/python3.11/site-packages/torch/serialization.py", line 944, in save
    with _open_zipfile_writer(f) as opened_zipfile:
  File "/env/lib/python3.11/site-packages/torch/serialization.py", line 784, in __init__
    super().__init__(torch._C.PyTorchFileWriter(self.name))
"""


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        (SAVE + "RuntimeError: File out/step-9.pt cannot be opened.", "output_not_writable"),
        (SAVE + "RuntimeError: Parent directory out/run does not exist.", "output_not_writable"),
        (
            "OSError: Unable to create file (unable to open file: name = 'a.h5', errno = 13, error message = 'Permission denied')",
            "output_not_writable",
        ),
        (
            "OSError: Unable to create file (unable to open file: name = 'a.h5', errno = 28, error message = 'No space left')",
            "disk_full",
        ),
        (
            'SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space" })',
            "disk_full",
        ),
        (
            'SafetensorError: Error while serializing: IoError(Os { code: 13, kind: PermissionDenied, message: "denied" })',
            "output_not_writable",
        ),
        ("RuntimeError: [enforce fail at inline_container.cc:595] . unexpected pos 64 vs 0", "disk_full"),
        ("RuntimeError: cannot open file out/model.bin for writing", "output_not_writable"),
    ],
)
def test_a_checkpoint_that_cannot_be_written(tmp_path: Path, line: str, wanted: str) -> None:
    assert of(tmp_path, line).findings[0].id == wanted


def test_a_checkpoint_that_cannot_be_read_is_no_output(tmp_path: Path) -> None:
    text = (
        SAVE.replace("in save", "in load")
        .replace("_open_zipfile_writer", "_open_zipfile_reader")
        .replace("save(", "load(")
    )
    found = of(
        tmp_path,
        text.replace("PyTorchFileWriter", "PyTorchFileReader") + "RuntimeError: File in/step-9.pt cannot be opened.",
    )
    assert [f.id for f in found.findings] == ["application_error"]


@pytest.mark.parametrize(
    "text",
    [
        'srun: error: xgetaddrinfo: getaddrinfo(n9:6818) failed: Name or service not known\nsrun: error: slurm_set_addr: Unable to resolve "n9"\n'
        "srun: error: Task launch for StepId=7.0 failed on node n9: Can't find an address, check slurm.conf\nsalloc: Relinquishing job allocation 7\n"
        "salloc: Job allocation 7 has been revoked.",
        "srun: error: fwd_tree_thread: can't find address for host n9, check slurm.conf",
    ],
)
def test_a_node_name_that_slurm_cannot_resolve(tmp_path: Path, text: str) -> None:
    assert of(tmp_path, text).findings[0].id == "slurm_controller_error"


def test_an_allocation_that_its_user_gives_back_has_not_failed(tmp_path: Path) -> None:
    text = f"salloc: Granted job allocation 7\n{STEPS}\nsalloc: Relinquishing job allocation 7\nsalloc: Job allocation 7 has been revoked."
    assert answer(of(tmp_path, text)) == ("healthy", [])


COMPLETIONS = (
    "{'train_runtime': 128.1, 'train_samples_per_second': 3.1, 'train_loss': 0.7, 'epoch': 3.0}",
    "`Trainer.fit` stopped: `max_epochs=3` reached.",
    "`Trainer.fit` stopped: `max_steps=300` reached.",
    "[exiting program at iteration 500] datetime: 2026-01-02 10:00:00",
    "  successfully saved checkpoint from iteration     500 to /ckpt [ t 1/1, p 1/1 ]",
    "[2026-01-02 10:00:00,123] [INFO] [launch.py:347:main] Process 4711 exits successfully.",
    "INFO:torch.distributed.elastic.agent.server.api:[default] worker group successfully finished. Waiting 300 seconds for other agents to finish.",
    "I0102 10:00:00.1 7 torch/distributed/elastic/agent/server/api.py:879] [default] Agent terminated with state: SUCCEEDED",
    "4711.0       train     gpu      lab         8  COMPLETED      0:0 ",
    "# Avg bus bandwidth    : 187.214 ",
    "Training complete!",
    "INFO - Finished training",
    "Done training.",
    "training done",
    "Training has ended.",
    "Finished epoch 3 of 3. All done!",
    "100%|##########| 500/500 [01:23<00:00,  6.01it/s]",
    "wandb: Run summary:",
    "wandb: Synced 5 W&B file(s), 0 media file(s), 0 artifact file(s) and 0 other file(s)",
    "wandb: View run lucky-1 at: https://wandb.ai/u/p/runs/ab",
    "Best model saved to out/best.pt",
    "Model weights saved in out/pytorch_model.bin",
    "Saved best checkpoint (epoch 7)",
    "***** eval metrics *****\n  epoch                   =        3.0\n  eval_loss               =     0.1234",
    "Test Accuracy: 91.23%",
    "val accuracy 0.912, val f1 0.88",
    "mAP@0.5: 0.421",
    "| test_acc | 0.9731 |",
    "Total training time: 1:02:03",
    "Training took 123.4 seconds",
    "Total time: 310.22 s",
    "500 epochs completed in 0.123 hours.",
    "Optimizer stripped from runs/exp/weights/best.pt, 14.5MB",
    "Job finished with exit code 0",
    "[2026-01-02 10:00:00,123] [INFO] [engine.py:3500:_save_zero_checkpoint] zero checkpoint saved out/global_step500/zero_pp_rank_0.pt",
    "[Torch] Checkpoint global_step500 is ready now!",
    "Checkpoint successfully created at: Checkpoint(filesystem=local, path=/x)",
    "script finished at Fri Nov 25",
    "End time: Fri Nov 25 10:00:00 2026",
    "INFO [rank0] Finished run in 31.2 s",
    "the training run ended normally",
    "Reached max steps 500, exiting",
    "max_steps (500) reached. Stopping training",
    "Early stopping triggered after 12 epochs",
    "rank 0 exiting, success",
    "***** train metrics *****\n  epoch = 3.0\n  train_loss = 0.5",
    "Saving model checkpoint to out/checkpoint-500",
)


@pytest.mark.parametrize("line", COMPLETIONS)
def test_what_frameworks_print_at_the_end_is_completion(tmp_path: Path, line: str) -> None:
    start = "\n".join(f"reading shard {'abcdefgh'[n % 8] * (n % 50 + 1)}" for n in range(300))
    assert answer(of(tmp_path, f"{start}\n{line}")) == ("healthy", [])


@pytest.mark.parametrize(
    "line",
    [
        "Loading checkpoint shards: 100%|##########| 4/4 [00:08<00:00,  2.10s/it]",
        "Downloading shards: 100%|##########| 4/4 [00:08<00:00,  2.10s/it]",
        "Running tokenizer on dataset (num_proc=8): 100%|##########| 900/900 [00:08<00:00, 110.2 examples/s]",
        "Loading safetensors checkpoint shards: 100% Completed | 4/4 [00:02<00:00,  1.97it/s]",
        "Capturing CUDA graphs (mixed prefill-decode): 100%|##########| 67/67 [00:20<00:00,  3.3it/s]",
        "Encoding texts: 100%|##########| 90/90 [00:01<00:00, 60.0it/s]",
        "Scanning labels: 100%|##########| 128/128 [00:00<00:00, 900it/s]",
        "Initialization done, training will start when all ranks are ready",
        "Epochs: 3, batch size: 8, learning rate: 0.001",
        "Loaded the model; loss function: cross entropy",
        "  num_train_epochs = 3\n  max_steps = 500\n  Total optimization steps = 500",
        "Dataset preparation finished",
        "Compiling done, batch size 8, epochs 3, lr 1e-4",
        "CUDA error handling is enabled\nNCCL error checks: on",
        "optional import failed: x, using default attention",
        "NCCL_ASYNC_ERROR_HANDLING=1\nwatchdog timeout(ms)=600000",
        "Tokenization done\nAll distributed processes registered. Starting with 8 processes",
        "test accuracy is measured every 500 steps",
        "Saving checkpoints every 500 steps to out",
        "checkpoints will be saved to out/model",
        "results written to out/log every 10 steps",
        "wandb: Syncing run lucky-1\nwandb: View run at https://wandb.ai/u/p/runs/ab",
    ],
)
def test_preparation_is_neither_progress_nor_completion(tmp_path: Path, line: str) -> None:
    assert answer(of(tmp_path, f"starting\n{line}")) == ("incomplete", [])


@pytest.mark.parametrize(
    ("end", "wanted"),
    [
        ("Training completed\nTraceback (most recent call last):\nValueError: bad", ("found", ["application_error"])),
        (
            "srun: error: n1: task 0: Exited with exit code 1\nwandb: Run summary:\nwandb:  loss 1.2",
            ("unexplained", []),
        ),
        (
            "E0102 16:59:05.1 7 torch/x/api.py:882] failed (exitcode: 1) local_rank: 0\nTraining has ended.\nTotal time: 3.1 s",
            ("unexplained", []),
        ),
        (
            "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2025-02-04T03:05:00 DUE TO TIME LIMIT ***\nKeyboardInterrupt",
            ("found", ["slurm_time_limit"]),
        ),
    ],
)
def test_what_looks_like_completion_does_not_hide_a_failure(
    tmp_path: Path, end: str, wanted: tuple[str, list[str]]
) -> None:
    assert answer(of(tmp_path, f"{STEPS}\n{end}")) == wanted


def test_a_lost_peer_after_completion_is_tear_down(tmp_path: Path) -> None:
    lost = "[rank1]:[W102 10:00:00.1 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=5): Broken pipe\n"
    lost += "[rank1]:[W102 10:00:00.2 ProcessGroupNCCL.cpp:1659] Failed to check the should dump flag on TCPStore, (maybe the server has shut down)"
    assert answer(of(tmp_path, f"{STEPS}\nTraining completed\n{lost}")) == ("healthy", [])
    assert answer(of(tmp_path, f"{STEPS}\n{lost}")) == ("found", ["peer_died_first"])


SPAWN = (
    'Traceback (most recent call last):\n  File "run.py", line 12, in <module>\n    mp.spawn(work, nprocs=2)\n'
    '  File "/v/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 200, in join\n    raise ProcessExitedException(\n'
    "torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal {0}"
)


@pytest.mark.parametrize(("name", "wanted"), [("SIGSEGV", "rank_died"), ("SIGKILL", "host_oom")])
def test_a_process_of_spawn_that_a_signal_ended(tmp_path: Path, name: str, wanted: str) -> None:
    assert answer(of(tmp_path, SPAWN.format(name)))[1][:1] == [wanted]


def test_an_exception_in_the_launcher_is_not_the_programs(tmp_path: Path) -> None:
    text = (
        'Traceback (most recent call last):\n  File "/v/bin/torchrun", line 8, in <module>\n    sys.exit(main())\n'
        '  File "/v/lib/python3.11/site-packages/torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py", line 113, in _call_store\n'
        "    return getattr(self._store, store_op)(*args, **kwargs)\nRuntimeError: {0}"
    )
    assert "application_error" not in answer(of(tmp_path, text.format("Broken pipe")))[1]
    own = text.replace("torch/distributed/elastic/rendezvous", "mine")
    assert answer(of(tmp_path, own.format("Broken pipe"))) == ("found", ["application_error"])


@pytest.mark.parametrize(
    "line",
    ["Failed to modify QP to RTR: Connection timed out", "could not move QP 71 to RTS: errno 113 (No route to host)"],
)
def test_a_queue_pair_that_does_not_connect(tmp_path: Path, line: str) -> None:
    assert answer(of(tmp_path, f"link_layer: Ethernet\n{line}\nerrno: 110"))[1][:1] == ["rdma_unreachable"]


def test_a_stall_that_horovod_reports_is_a_hang(tmp_path: Path) -> None:
    text = (
        "[2026-01-02 10:00:00.1: W /tmp/pip/horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced, gathered "
        "or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds.\nMissing ranks:\n2: [grad.head]"
    )
    assert answer(of(tmp_path, f"{STEPS}\n{text}")) == ("found", ["collective_hang"])
