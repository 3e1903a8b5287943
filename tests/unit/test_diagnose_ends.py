"""How a log ends, and its verdict: failures need no class, survived ones are remarks, and health needs evidence."""

import json
from pathlib import Path

import pytest

from tests.unit.diagnose_examples import STEPS, answer, ids, of, oom

TABLE = """torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
train.py FAILED
Root Cause (first observed failure):
[0]:
  time      : 2025-02-04_03:04:05
  host      : node-d
  rank      : 3 (local_rank: 3)
  exitcode  : {code} (pid: 7120)
  traceback : Signal {number} ({name}) received by PID 7120"""
STAMP, ELASTIC = "[2026-01-02 10:00:00,123]", "torch.distributed.elastic"


@pytest.mark.parametrize(
    "line",
    [
        f"{STAMP} [INFO] [launch.py:319:sigkill_handler] Main process received SIGINT, exiting",
        'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\nKeyboardInterrupt',
        "^CTraceback (most recent call last):",
        f"{ELASTIC}.multiprocessing.api.SignalException: Process 77 got signal: 2",
        "W0102 10:00:00.1 77 torch/x/api.py:741] Received Signals.SIGINT death signal, shutting down workers",
        "Detected KeyboardInterrupt, attempting graceful shutdown ...",
        "User interrupted the training",
        "srun: Cancelled pending job step with signal 2",
        "make: *** [train] Interrupt",
        "Exception ignored in: <function Loader.__del__>\nTraceback (most recent call last):\nKeyboardInterrupt: \n"
        "^CTraceback (most recent call last):\nKeyboardInterrupt: ",
        f"{STAMP} [ERROR] [launch.py:321:sigkill_handler] ['python', 'x'] exits with return code = -2",
    ],
)
@pytest.mark.parametrize("after", ["", "\nSaved the final model to out/last.pt\nTraining finished"])
def test_an_interrupt_by_the_user_is_a_cancellation_and_never_healthy(tmp_path: Path, line: str, after: str) -> None:
    assert answer(of(tmp_path, f"{STEPS}\n{line}{after}")) == ("found", ["slurm_cancelled"])


def test_a_stop_by_a_signal_outside_slurm_is_not_called_a_cancellation_by_a_user(tmp_path: Path) -> None:
    (finding,) = of(tmp_path, "step 3/9 loss 2.1\nTraceback (most recent call last):\nKeyboardInterrupt").findings
    assert finding.id == "slurm_cancelled"
    assert "user" not in finding.title and finding.next_test.startswith("the line names the signal")


def _steps(form: str, values: list[str]) -> str:
    return "\n".join(form.format(n=100 + n, v=value) for n, value in enumerate(values))


@pytest.mark.parametrize(
    "form",
    [
        "iteration {n}/ 5000 | loss scale: 1.0 | grad norm: {v} | number of nan iterations: 0 |",
        "{{'loss': 0.0, 'grad_norm': {v}, 'learning_rate': 1e-05, 'epoch': 0.{n}}}",
        "2026-01-02 10:00:00 | INFO | train | epoch 1 step {n} loss: {v} tokens/s 900",
        "Epoch 1:  20%|##        | {n}/900 [00:10<01:00, 9.5it/s, v_num=0, train_loss={v}]",
        "epoch {n} train_loss {v} val_loss 1.2",
        "[INFO] iteration {n} lr: 1e-4 loss: tensor({v}, device='cuda:0')",
    ],
)
def test_values_that_stay_non_finite_are_a_finding(tmp_path: Path, form: str) -> None:
    good, bad = ["1.5"] * 6, ["nan"] * 6
    assert answer(of(tmp_path, _steps(form, good))) == ("healthy", [])
    assert answer(of(tmp_path, _steps(form, good + bad))) == ("found", ["loss_not_finite"])
    assert answer(of(tmp_path, _steps(form, bad + good))) == ("healthy", [])
    assert answer(of(tmp_path, _steps(form, good + bad) + "\nTraining completed")) == ("found", ["loss_not_finite"])


def test_a_crash_signal_alone_is_an_unsure_finding(tmp_path: Path) -> None:
    table = TABLE.format(code=-11, number=11, name="SIGSEGV")
    (finding,) = of(tmp_path, table).findings
    assert (finding.id, finding.rank, finding.host) == ("rank_died", 3, "node-d")
    assert finding.confidence <= 0.5 and any("only the signal" in text for text in finding.against)
    stack = 'Current thread 0x00007f (most recent call first):\n  File "ext.py", line 7 in call'
    sure = of(tmp_path, f"Fatal Python error: Segmentation fault\n\n{stack}\n{table}").findings[0]
    assert (sure.id, sure.against) == ("rank_died", []) and sure.confidence > 0.7


SAVE = """Traceback (most recent call last):
  File "/env/lib/python3.11/site-packages/torch/serialization.py", line 944, in save
    with _open_zipfile_writer(f) as opened_zipfile:
"""
LOAD = SAVE.replace("in save", "in load").replace("zipfile_writer", "zipfile_reader")
SPAWN = """Traceback (most recent call last):
  File "/v/lib/python3.11/site-packages/torch/multiprocessing/spawn.py", line 200, in join
torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal """
RENDEZVOUS = """Traceback (most recent call last):
  File "/v/lib/{}/c10d_rendezvous_backend.py", line 113, in _call_store
RuntimeError: Broken pipe"""
IGNORED = """Exception ignored in: <function Recorder.__del__ at 0x7f00>
Traceback (most recent call last):
  File "/env/lib/python3.12/site-packages/rec/core.py", line 41, in __del__
AssertionError:"""
MOVED = "slurmstepd: error: couldn't chdir to `/tmp/u/work': No such file or directory: going to /tmp instead"
TORN = (
    "[rank1]:[W102 10:00:00.1 TCPStore.cpp:106] [c10d] sendBytes failed on SocketImpl(fd=5): Broken pipe\n"
    "[rank1]:[W102 10:00:00.2 ProcessGroupNCCL.cpp:1659] Failed to check the should dump flag on TCPStore, (maybe the "
    "server has shut down)"
)
STALLED = (
    "[2026-01-02 10:00:00.1: W /x/common/stall_inspector.cc:107] One or more tensors were submitted to be reduced,"
    " gathered or broadcasted by subset of ranks and are waiting for remainder of ranks for more than 60 seconds."
)
REVOKED = "salloc: Relinquishing job allocation 7\nsalloc: Job allocation 7 has been revoked."
LEFT = """  time      : 2026-01-02_10:00:{}
  host      : n1
  exitcode  : {} (pid: 7)
"""
AGENT = f"{LEFT.format('00', 1)}{{}}Root Cause (first observed failure):\n{LEFT.format('00', 1)}  rank      : 1"
UNTYPED = """  File "/w/train.py", line 9, in main
    step()
  File "/w/train.py", line 4, in step
    ^^^^^
Expected all tensors to be on one device
"""
GRAD = "step {n} loss 2.1 grad_norm: {v}"
MIXED = "\n".join(f"step {n} loss nan\nstep={n}, skipped=0, lr=[1e-05]\nglobal_step={n} samples/s 3" for n in range(9))
TIMEOUT = "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2025-02-04T03:05:00 DUE TO TIME LIMIT ***"
ADDRESS = "srun: error: Task launch for StepId=7.0 failed on node n9: Can't find an address, check slurm.conf"

FIRST_CAUSES = {
    "loss_not_finite": (
        "Loss is nan, stopping training",
        "ERROR: Non-finite loss detected at step 30, aborting",
        MIXED,
        _steps(GRAD, ["1.0"] * 9 + ["inf"] * 9),
    ),
    "rendezvous_unreachable": ("ERROR rendezvous timed out: 3 of 4 nodes joined", "rendezvous timeout: no answer"),
    "script_not_found": (f"{MOVED}\nsrun: error: n1: task 0: Exited with exit code 2",),
    "memlock_limit": (
        "node-f:5:9 [0] ibvwrap.cc:262 NCCL WARN Call to ibv_reg_mr failed with error Bad address",
        "ucp_mm.c:150 UCX  ERROR failed to register address 0x7f length 4096 on mlx5_0: Cannot allocate memory",
        "UCX  ERROR mlx5_1: ibv_create_cq(cqe=4096) failed: Cannot allocate memory",
        "libfabric:7:1:efa:mr:efa_mr_reg_impl():1<warn> Unable to register MR: ENOMEM",
    ),
    "output_not_writable": (
        SAVE + "RuntimeError: File out/step-9.pt cannot be opened.",
        SAVE + "RuntimeError: Parent directory out/run does not exist.",
        "OSError: Unable to create file (name = 'a.h5', errno = 13, error message = 'Permission denied')",
        "RuntimeError: cannot open file out/model.bin for writing",
    ),
    "disk_full": (
        'SafetensorError: Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space" })',
        "RuntimeError: [enforce fail at inline_container.cc:595] . unexpected pos 64 vs 0",
    ),
    "application_error": (
        LOAD + "RuntimeError: File in/step-9.pt cannot be opened.",
        RENDEZVOUS.format("mine"),
        f"{STEPS}\nTraining completed\nTraceback (most recent call last):\nValueError: bad",
        UNTYPED + AGENT.format(""),
        '  "message": {\n    "message": "RuntimeError: Permission denied",',  # torch's launcher writes it
    ),
    "library_missing": (
        "RuntimeError: Failed to import a.b because of the following error:\n"
        "/v/x_cuda.cpython-312.so: undefined symbol: _Z1",
        "/w/x/main.c:4:10: fatal error: Python.h: No such file or directory",
    ),
    "slurm_controller_error": (f"{ADDRESS}\n{REVOKED}",),
    "slurm_time_limit": (f"{TIMEOUT}\nKeyboardInterrupt",),
    "rdma_unreachable": (
        "link_layer: Ethernet\nFailed to modify QP to RTR: Connection timed out",
        "link_layer: Ethernet\ncould not move QP 71 to RTS: errno 113 (No route to host)",
    ),
    "peer_died_first": (f"{STEPS}\n{TORN}",),
    "rank_died": (f"{SPAWN}SIGSEGV",),
    "host_oom": (f"{SPAWN}SIGKILL", AGENT.format(LEFT.format("00", -9))),
    "collective_hang": (f"{STEPS}\n{STALLED}",),
}


@pytest.mark.parametrize(("text", "cause"), [(text, cause) for cause, texts in FIRST_CAUSES.items() for text in texts])
def test_the_first_cause_of_a_text(tmp_path: Path, text: str, cause: str) -> None:
    assert of(tmp_path, f"{text}\nsrun: error: n1: task 0: Exited with exit code 1").findings[0].id == cause


ENDED = "E0102 16:59:05.1 7 torch/x/api.py:882] failed (exitcode: 1) local_rank: 0"
START = "n1:7:7 [0] NCCL INFO Bootstrap : Using eno1:10.4.0.12<0>"
QUIET = "\n".join(f"reading shard {'abcdefgh'[n % 8] * (n % 50 + 1)}" for n in range(400))
# each of a part of the rules; the verdict if it is the end of a log, and if steps stand before it
NO_CAUSE = {
    "unexplained": (
        TABLE.format(code=-6, number=6, name="SIGABRT"),
        "terminate called after throwing an instance of 'std::runtime_error'\n  what():  something that nobody knows",
        "job.sh: line 9: 4711 Aborted                 (core dumped) python train.py",
        "srun: error: node-b: task 3: Aborted (core dumped)",
        "[default1]:  what():  CUDA error: unknown error",
        "(Worker pid=7) [2026-01-02 10:00:00,227 E 7 9] logging.cc:97: Unhandled exception: St9exception.",
        "Exception raised from operator() at /src/backend/process_group_xyz.cpp:286 (most recent call first):",
        "libc++abi: terminating due to uncaught exception of type std::bad_function_call",
        "UR backend failed. UR backend returns:39",
        "[2026-01-02 10:00:00.1][HABANA] synLaunch call failed with status 26",
        f"{IGNORED}\n{ENDED}",
        AGENT.format(LEFT.format("31", -9)),  # the agent itself killed this rank, 30 s after its SIGTERM
        "Last error:\nCuda failure 'initialization error'",
        "srun: error: n1: task 0: Exited with exit code 1\nwandb: Run summary:\nwandb:  loss 1.2",
        f"{ENDED}\nTraining has ended.\nTotal time: 3.1 s",
    ),
    "incomplete": (
        "n1:7:7 [0] misc/ibvwrap.cc:63 NCCL WARN Failed to open libibverbs.so[.1]",
        MOVED,
        "n1:7:7 [0] NCCL WARN NET/IB : Unable to open device rocep1 - ignoring",
        "libibverbs: Warning: couldn't load driver 'libxy.so': libxy.so: cannot open shared object file",
        "2026-01-02 10:00:00.1: E x/cuda_fft.cc:477] Unable to register cuFFT factory: one has already been registered",
        "error: XDG_RUNTIME_DIR not set in the environment.",
        "ERROR: ld.so: object 'libx.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.",
        "INFO: init_process_group: rendezvous at tcp://n1:29500, timeout: 0:30:00",
        "Namespace(rdzv_backend='c10d', rdzv_timeout=600, ddp_timeout=1800)",
        "the signal handler for SIGINT is set",
        "check_for_nan_in_loss: True\nnumber of nan iterations: 0",
        IGNORED,
        UNTYPED,  # nothing reports a failure
        "loading: Traceback (most recent call last):",
        "Loading checkpoint shards: 100%|##########| 4/4 [00:08<00:00,  2.10s/it]",
        "Capturing CUDA graphs (mixed prefill-decode): 100%|##########| 67/67 [00:20<00:00,  3.3it/s]",
        "Initialization done, training will start when all ranks are ready",
        "  num_train_epochs = 3\n  max_steps = 500\n  Total optimization steps = 500",
        "CUDA error handling is enabled\nNCCL error checks: on",
        "NCCL_ASYNC_ERROR_HANDLING=1\nwatchdog timeout(ms)=600000",
        "Saving checkpoints every 500 steps to out\nresults written to out/log every 10 steps",
        *(
            f"{end}\n{QUIET}"
            for end in ("Training completed in 5 s", "{'train_runtime': 12.5, 'train_loss': 1.0}", STEPS)
        ),
        f"{STAMP[:-5]} WARNING] request timed out, retrying",  # what a logger calls a warning is no sign
    ),
    "healthy": (
        *(
            f"{QUIET}\n{end}"
            for end in (
                "{'train_runtime': 128.1, 'train_samples_per_second': 3.1, 'train_loss': 0.7, 'epoch': 3.0}",
                "`Trainer.fit` stopped: `max_epochs=3` reached.",
                "[exiting program at iteration 500] datetime: 2026-01-02 10:00:00",
                "  successfully saved checkpoint from iteration     500 to /ckpt [ t 1/1, p 1/1 ]",
                "INFO:torch.distributed.elastic.agent.server.api:[default] worker group successfully finished.",
                "4711.0       train     gpu      lab         8  COMPLETED      0:0 ",
                "# Avg bus bandwidth    : 187.214 ",
                "Training complete!",
                "INFO - Finished training",
                "100%|##########| 500/500 [01:23<00:00,  6.01it/s]",
                "wandb: Run summary:",
                "Best model saved to out/best.pt",
                "***** eval metrics *****\n  epoch         =        3.0\n  eval_loss        =     0.1234",
                "Test Accuracy: 91.23%",
                "Total training time: 1:02:03",
                "Job finished with exit code 0",
                "max_steps (500) reached. Stopping training",
                "rank 0 exiting, success",
                "Saving model checkpoint to out/checkpoint-500",
                STEPS,
            )
        ),
        f"salloc: Granted job allocation 7\n{STEPS}\n{REVOKED}",
        f"{STEPS}\nTraining completed\n{TORN}",
        _steps(GRAD, ["inf", "inf", *["1.0"] * 30]),
        _steps(GRAD, ["1.0"] * 30 + ["inf"]),
    ),
}


@pytest.mark.parametrize(("text", "verdict"), [(text, name) for name, texts in NO_CAUSE.items() for text in texts])
def test_the_verdict_of_a_text_without_a_cause(tmp_path: Path, text: str, verdict: str) -> None:
    assert answer(of(tmp_path, f"{START}\n{text}")) == (verdict, [])
    with_steps = f"{text}\n{STEPS}" if verdict == "incomplete" else f"{STEPS}\n{text}"
    assert answer(of(tmp_path, with_steps)) == ("healthy" if verdict == "incomplete" else verdict, [])


def test_an_exception_in_the_launcher_is_not_the_programs(tmp_path: Path) -> None:
    own = RENDEZVOUS.format("site-packages/torch/distributed/elastic/rendezvous")
    assert "application_error" not in ids(of(tmp_path, own))


@pytest.mark.parametrize(
    ("line", "emitter"),
    [
        ("Traceback (most recent call last):", "python"),
        ("2026-01-02 10:00:00,123 - my.trainer - ERROR - giving up", "program"),
        ("node-a:7:9 [0] misc/socket.cc:57 NCCL WARN something new went wrong", "nccl"),
        ("srun: error: node-b: task 3: Exited with exit code 9", "slurm_client"),
        ("slurmstepd: error: container_p_join: open failed for something", "slurm_daemon"),
        (f"{STAMP} [ERROR] [launch.py:321:sigkill_handler] ['python', 'x'] exits with return code = 1", "launcher"),
        ("/var/spool/slurmd/job9/slurm_script: line 12: 4711 Terminated   python x", "shell"),
        ("train.py FAILED\nRoot Cause (first observed failure):\n[0]:\n  exitcode  : 1 (pid: 7)", "launcher"),
        ("ray.exceptions.ActorDiedError: The actor died unexpectedly", "python"),
        ("[E1218 20:27:21.426415540 Something.cpp:12] an unknown thing", "torch"),
        ("4711 train gpu 8 FAILED 1:0", "program"),
        (f"{STAMP[:-5]} ERROR] request timed out", "program"),
    ],
)
def test_a_failure_of_no_class_is_unexplained_and_its_emitter_is_named(tmp_path: Path, line: str, emitter: str) -> None:
    found = of(tmp_path, f"{STEPS}\n{line}")
    assert answer(found) == ("unexplained", []) and found.unexplained is not None
    assert found.unexplained.emitter == emitter and found.unexplained.read_next
    assert found.unexplained.evidence[0].text in line


def test_records_of_ranks_that_succeeded_or_saved_when_they_were_stopped_are_healthy(tmp_path: Path) -> None:
    record = {"host": "n1", "failed": [], "succeeded": [{"rank": 0, "host": "n1", "exitcode": 0, "time": 1.7e9}]}
    logs = {"n1.rank0.log": "no progress is printed"}
    assert of(tmp_path / "a", {"n1.exit.json": json.dumps(record, indent=2), **logs}).verdict == "healthy"
    record["reason"] = "the agent received SIGTERM"  # as after the end of the command that followed them
    assert of(tmp_path / "b", {"n1.exit.json": json.dumps(record, indent=2)}).verdict == "healthy"


@pytest.mark.parametrize("line", [oom(), "ERROR could not write the profile, going on", "KeyError: 'labels'"])
def test_what_the_job_survived_is_a_remark(tmp_path: Path, line: str) -> None:
    assert of(tmp_path, f"{STEPS}\n{line}").verdict in ("found", "unexplained")
    assert answer(of(tmp_path, f"{STEPS}\n{line}\nretrying\n{STEPS}")) == ("healthy", [])
