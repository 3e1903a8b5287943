"""How a log ends: completion, progress, an interrupt, values that stay non-finite, a signal alone, and what only looks
like an error."""

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
    (
        "W0102 10:00:00.1 77 torch/distributed/elastic/agent/server/api.py:741] Received Signals.SIGINT death signal, "
        "shutting down workers"
    ),
    "Detected KeyboardInterrupt, attempting graceful shutdown ...",
    "INFO: interrupted by user, saving a last checkpoint",
    "Received Ctrl-C, stopping after this step",
    "User interrupted the training",
    "Received signal 2, terminating",
    (
        "W0102 10:00:00.1 77 torch/distributed/elastic/agent/server/api.py:741] Received 2 death signal, shutting down "
        "workers"
    ),
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


def _steps(form: str, values: list[str]) -> str:
    return "\n".join(form.format(n=100 + n, v=value) for n, value in enumerate(values))


NON_FINITE = (
    (
        "iteration {n}/ 5000 | elapsed time per iteration (ms): 412.9 | loss scale: 1.0 | grad norm: {v} | number of "
        "nan iterations: 0 |"
    ),
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


def test_a_crash_signal_alone_is_an_unsure_finding(tmp_path: Path) -> None:
    alone = of(tmp_path, TABLE.format(code=-11, number=11, name="SIGSEGV"))
    (finding,) = alone.findings
    assert (finding.id, finding.rank, finding.host) == ("rank_died", 3, "node-d")
    assert finding.confidence <= 0.5
    assert any("only the signal" in text for text in finding.against)
    stack = (
        'Fatal Python error: Segmentation fault\n\nCurrent thread 0x00007f (most recent call first):\n  File "ext.py", '
        "line 7 in call\n"
    )
    told = of(tmp_path, stack + TABLE.format(code=-11, number=11, name="SIGSEGV")).findings[0]
    assert (told.id, told.against) == ("rank_died", [])
    assert told.confidence > 0.7


SAVE = """Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/torch/serialization.py", line 944, in save
    with _open_zipfile_writer(f) as opened_zipfile:
  File "/env/lib/python3.11/site-packages/torch/serialization.py", line 784, in __init__
    super().__init__(torch._C.PyTorchFileWriter(self.name))
"""
LOAD = (
    SAVE.replace("in save", "in load").replace("zipfile_writer", "zipfile_reader").replace("FileWriter", "FileReader")
)
SPAWN = """Traceback (most recent call last):
  File "/v/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 200, in join
    raise ProcessExitedException(
torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal """
RENDEZVOUS = """Traceback (most recent call last):
  File "/v/bin/torchrun", line 8, in <module>
    sys.exit(main())
  File "/v/lib/{}/c10d_rendezvous_backend.py", line 113, in _call_store
RuntimeError: Broken pipe"""
IGNORED = """Exception ignored in: <function Recorder.__del__ at 0x7f00>
Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/rec/core.py", line 41, in __del__
AssertionError:"""
MOVED = "slurmstepd: error: couldn't chdir to `/tmp/u/work': No such file or directory: going to /tmp instead"
TORN = """[rank1]:[W102 10:00:00.1 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=5): Broken pipe
[rank1]:[W102 10:00:00.2 ProcessGroupNCCL.cpp:1659] Failed to check the should dump flag on TCPStore, (maybe the server has shut down)"""
STALLED = """[2026-01-02 10:00:00.1: W /tmp/pip/horovod/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced, gathered \
or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds."""
REVOKED = "salloc: Relinquishing job allocation 7\nsalloc: Job allocation 7 has been revoked."
GRAD = "step {n} loss 2.1 grad_norm: {v}"
MIXED = "\n".join(
    f"step {n} loss nan\nstep={n}, skipped=0, lr=[1e-05]\nglobal_step={n} samples/s 3.1" for n in range(9)
)

FIRST_CAUSES = {
    "loss_not_finite": (
        "Loss is nan, stopping training",
        "ERROR: Non-finite loss detected at step 30, aborting",
        "AssertionError: Rank 0: found NaN in local forward loss calculation",
        "FloatingPointError: loss became infinite",
        MIXED,
        _steps(GRAD, ["1.0"] * 9 + ["inf"] * 9),
    ),
    "rendezvous_unreachable": (
        "ERROR rendezvous timed out: 3 of 4 nodes joined",
        "RuntimeError: rendezvous timeout after 600 seconds",
        "rendezvous timeout: no answer",
    ),
    "script_not_found": (f"{MOVED}\nsrun: error: n1: task 0: Exited with exit code 2",),
    "memlock_limit": (
        "node-f:5:9 [0] ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed with error Bad address",
        "node-f:5:9 [0] ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        "ucp_mm.c:150 UCX  ERROR failed to register address 0x7f length 4096 on mlx5_0: Cannot allocate memory",
        "Last error:\n[rank4]: Call to ibv_reg_dmabuf_mr failed with error Cannot allocate memory errno 12",
        "UCX  ERROR mlx5_1: ibv_create_cq(cqe=4096) failed: Cannot allocate memory",
        "libfabric:7:1:efa:mr:efa_mr_reg_impl():1<warn> Unable to register MR: ENOMEM",
    ),
    "output_not_writable": (
        SAVE + "RuntimeError: File out/step-9.pt cannot be opened.",
        SAVE + "RuntimeError: Parent directory out/run does not exist.",
        "OSError: Unable to create file (name = 'a.h5', errno = 13, error message = 'Permission denied')",
        'SafetensorError: Error while serializing: IoError(Os { code: 13, kind: PermissionDenied, message: "denied" })',
        "RuntimeError: cannot open file out/model.bin for writing",
    ),
    "disk_full": (
        "OSError: Unable to create file (name = 'a.h5', errno = 28, error message = 'No space left')",
        'SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space" })',
        "RuntimeError: [enforce fail at inline_container.cc:595] . unexpected pos 64 vs 0",
    ),
    "application_error": (
        LOAD + "RuntimeError: File in/step-9.pt cannot be opened.",
        RENDEZVOUS.format("mine"),
        f"{STEPS}\nTraining completed\nTraceback (most recent call last):\nValueError: bad",
    ),
    "slurm_controller_error": (
        (
            "srun: error: Task launch for StepId=7.0 failed on node n9: Can't find an address, check "
            f"slurm.conf\n{REVOKED}"
        ),
        "srun: error: fwd_tree_thread: can't find address for host n9, check slurm.conf",
    ),
    "slurm_time_limit": (
        "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2025-02-04T03:05:00 DUE TO TIME LIMIT ***\nKeyboardInterrupt",
    ),
    "rdma_unreachable": (
        "link_layer: Ethernet\nFailed to modify QP to RTR: Connection timed out",
        "link_layer: Ethernet\ncould not move QP 71 to RTS: errno 113 (No route to host)",
    ),
    "peer_died_first": (f"{STEPS}\n{TORN}",),
    "rank_died": (f"{SPAWN}SIGSEGV",),
    "host_oom": (f"{SPAWN}SIGKILL",),
    "collective_hang": (f"{STEPS}\n{STALLED}",),
}  # fmt: skip


@pytest.mark.parametrize(("text", "cause"), [(text, cause) for cause, texts in FIRST_CAUSES.items() for text in texts])
def test_the_first_cause_of_a_text(tmp_path: Path, text: str, cause: str) -> None:
    assert of(tmp_path, f"{text}\nsrun: error: n1: task 0: Exited with exit code 1").findings[0].id == cause


ENDED = "E0102 16:59:05.1 7 torch/x/api.py:882] failed (exitcode: 1) local_rank: 0"
START = "n1:7:7 [0] NCCL INFO Bootstrap : Using eno1:10.4.0.12<0>"
QUIET = "\n".join(f"reading shard {'abcdefgh'[n % 8] * (n % 50 + 1)}" for n in range(300))
# each of a part of the rules; the verdict if it is the end of a log, and if steps stand before it
NO_CAUSE = {
    "unexplained": (
        TABLE.format(code=-6, number=6, name="SIGABRT"),
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  something that nobody knows",
        "job.sh: line 9: 4711 Aborted                 (core dumped) python train.py",
        "srun: error: node-b: task 3: Aborted (core dumped)",
        "[default1]:  what():  CUDA error: unknown error",
        "RuntimeWorker: HIP error: unknown",
        "(Worker pid=7) [2026-01-02 10:00:00,227 E 7 9] logging.cc:97: Unhandled exception: St9exception.",
        "Exception raised from operator() at /src/backend/process_group_xyz.cpp:286 (most recent call first):",
        "libc++abi: terminating due to uncaught exception of type std::bad_function_call",
        "python: queue.c:2617: push: Assertion `x' failed.",
        "UR backend failed. UR backend returns:39",
        "synStatus 26: HCL collective call returned error",
        "[2026-01-02 10:00:00.1][HABANA] synLaunch call failed with status 26",
        f"{IGNORED}\n{ENDED}",
        "srun: error: n1: task 0: Exited with exit code 1\nwandb: Run summary:\nwandb:  loss 1.2",
        f"{ENDED}\nTraining has ended.\nTotal time: 3.1 s",
    ),
    "incomplete": (
        (
            'n1:7:7 [0] /build/rccl/init.cc:120 NCCL WARN Missing "iommu=pt" from kernel command line which can lead '
            'to hang!'
        ),
        "n1:7:7 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
        "n1:7:7 [0] misc/cudawrap.cc:36 NCCL WARN Failed to find CUDA library libcuda.so in /usr/lib",
        MOVED,
        "slurmstepd: error: Unable to get the home directory of user: using / instead",
        "n1:7:7 [0] NCCL WARN NET/IB : Unable to open device rocep1 - ignoring",
        "n1:7:7 [0] NCCL WARN Could not get NUMA node, performance might be reduced",
        "libibverbs: Warning: couldn't load driver 'libxy.so': libxy.so: cannot open shared object file",
        (
            "2026-01-02 10:00:00.1: E external/xla/cuda_fft.cc:477] Unable to register cuFFT factory: one has already "
            "been registered"
        ),
        "error: XDG_RUNTIME_DIR not set in the environment.",
        "fatal: not a git repository (or any of the parent directories): .git",
        "ERROR: ld.so: object 'libx.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.",
        "slurmstepd: error: pyxis: [WARN] container-cli: no devices",
        "INFO: init_process_group: rendezvous at tcp://n1:29500, timeout: 0:30:00",
        "  rdzv_configs     : {'timeout': 900}",
        "Namespace(rdzv_backend='c10d', rdzv_timeout=600, ddp_timeout=1800)",
        "the signal handler for SIGINT is set",
        "use Ctrl-C to stop the run; a KeyboardInterrupt handler saves the state",
        "check_for_nan_in_loss: True\nnumber of nan iterations: 0",
        "checking for nan loss is enabled\nnan_grads: 0 inf_grads: 0",
        IGNORED,
        "Loading checkpoint shards: 100%|##########| 4/4 [00:08<00:00,  2.10s/it]",
        "Downloading shards: 100%|##########| 4/4 [00:08<00:00,  2.10s/it]",
        "Running tokenizer on dataset (num_proc=8): 100%|##########| 900/900 [00:08<00:00, 110.2 examples/s]",
        "Capturing CUDA graphs (mixed prefill-decode): 100%|##########| 67/67 [00:20<00:00,  3.3it/s]",
        "Scanning labels: 100%|##########| 128/128 [00:00<00:00, 900it/s]",
        "Initialization done, training will start when all ranks are ready",
        "Epochs: 3, batch size: 8, learning rate: 0.001",
        "Loaded the model; loss function: cross entropy",
        "  num_train_epochs = 3\n  max_steps = 500\n  Total optimization steps = 500",
        "Dataset preparation finished\nCompiling done, batch size 8, epochs 3, lr 1e-4",
        "CUDA error handling is enabled\nNCCL error checks: on",
        "optional import failed: x, using default attention",
        "NCCL_ASYNC_ERROR_HANDLING=1\nwatchdog timeout(ms)=600000",
        "Tokenization done\nAll distributed processes registered. Starting with 8 processes",
        "test accuracy is measured every 500 steps\ncheckpoints will be saved to out/model",
        "Saving checkpoints every 500 steps to out\nresults written to out/log every 10 steps",
        "wandb: Syncing run lucky-1\nwandb: View run at https://wandb.ai/u/p/runs/ab",
    ),
    "healthy": (
        f"{QUIET}\n{{'train_runtime': 128.1, 'train_samples_per_second': 3.1, 'train_loss': 0.7, 'epoch': 3.0}}",
        f"{QUIET}\n`Trainer.fit` stopped: `max_epochs=3` reached.",
        f"{QUIET}\n[exiting program at iteration 500] datetime: 2026-01-02 10:00:00",
        f"{QUIET}\n  successfully saved checkpoint from iteration     500 to /ckpt [ t 1/1, p 1/1 ]",
        f"{QUIET}\n[2026-01-02 10:00:00,123] [INFO] [launch.py:347:main] Process 4711 exits successfully.",
        f"{QUIET}\nINFO:torch.distributed.elastic.agent.server.api:[default] worker group successfully finished.",
        f"{QUIET}\nI0102 10:00:00.1 7 torch/x/api.py:879] [default] Agent terminated with state: SUCCEEDED",
        f"{QUIET}\n4711.0       train     gpu      lab         8  COMPLETED      0:0 ",
        f"{QUIET}\n# Avg bus bandwidth    : 187.214 ",
        f"{QUIET}\nTraining complete!",
        f"{QUIET}\nINFO - Finished training",
        f"{QUIET}\nFinished epoch 3 of 3. All done!",
        f"{QUIET}\n100%|##########| 500/500 [01:23<00:00,  6.01it/s]",
        f"{QUIET}\nwandb: Run summary:",
        f"{QUIET}\nwandb: Synced 5 W&B file(s), 0 media file(s), 0 artifact file(s) and 0 other file(s)",
        f"{QUIET}\nBest model saved to out/best.pt",
        (
            f"{QUIET}\n***** eval metrics *****\n  epoch                   =        3.0\n  eval_loss               =   "
            "  0.1234"
        ),
        f"{QUIET}\nTest Accuracy: 91.23%",
        f"{QUIET}\nmAP@0.5: 0.421",
        f"{QUIET}\n| test_acc | 0.9731 |",
        f"{QUIET}\nTotal training time: 1:02:03",
        f"{QUIET}\n500 epochs completed in 0.123 hours.",
        f"{QUIET}\nOptimizer stripped from runs/exp/weights/best.pt, 14.5MB",
        f"{QUIET}\nJob finished with exit code 0",
        (
            f"{QUIET}\n[2026-01-02 10:00:00,123] [INFO] [engine.py:3500:_save_zero_checkpoint] zero checkpoint saved "
            "out/x.pt"
        ),
        f"{QUIET}\nEnd time: Fri Nov 25 10:00:00 2026",
        f"{QUIET}\nINFO [rank0] Finished run in 31.2 s",
        f"{QUIET}\nmax_steps (500) reached. Stopping training",
        f"{QUIET}\nEarly stopping triggered after 12 epochs",
        f"{QUIET}\nrank 0 exiting, success",
        f"{QUIET}\nSaving model checkpoint to out/checkpoint-500",
        f"salloc: Granted job allocation 7\n{STEPS}\n{REVOKED}",
        f"{STEPS}\nTraining completed\n{TORN}",
        _steps(GRAD, ["inf", "inf", *["1.0"] * 30]),
        _steps(GRAD, ["1.0"] * 30 + ["inf"]),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "verdict"), [(text, verdict) for verdict, texts in NO_CAUSE.items() for text in texts]
)
def test_the_verdict_of_a_text_without_a_cause(tmp_path: Path, text: str, verdict: str) -> None:
    assert answer(of(tmp_path, f"{START}\n{text}")) == (verdict, [])
    with_steps = f"{text}\n{STEPS}" if verdict == "incomplete" else f"{STEPS}\n{text}"
    assert answer(of(tmp_path, with_steps)) == ("healthy" if verdict == "incomplete" else verdict, [])


def test_an_exception_in_the_launcher_is_not_the_programs(tmp_path: Path) -> None:
    own = RENDEZVOUS.format("site-packages/torch/distributed/elastic/rendezvous")
    assert "application_error" not in answer(of(tmp_path, own))[1]
