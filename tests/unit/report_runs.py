"""Run folders for the tests of the report page, written as the program writes them, and the basic check of each."""

import json
import math
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from allranks.rundir.paths import RunDir

START = 1_795_215_900.0
GIB = 1024**3
VERSIONS = {"torch": "2.13.0", "transformers": "5.23.0", "allranks": "0.1.0"}
SAMPLES = [("What is 2 + 2?", "4", "88888", "4"), ("What is 3 + 5?", "8", "the the", "9")]


class Maker:
    """Writes one run folder. Every keyword has a default; what is written last is the summary."""

    def __init__(
        self, root: Path, name: str = "demo", *, ranks: int = 2, hosts: tuple[str, ...] = ("one",), seed: int = 1
    ):
        self.run = RunDir(root / name)
        self.ranks, self.hosts = ranks, hosts
        self.random = random.Random(seed)
        self.time = START
        self.events: dict[int, list[dict[str, Any]]] = {r: [] for r in range(ranks)}
        for folder in (self.run.events, self.run.telemetry, self.run.logs_of(1), self.run.checkpoints):
            folder.mkdir(parents=True)

    def tell(self, event: str, *, only: int | None = None, after: float = 0.0, **fields: Any) -> None:
        self.time += after
        for rank, events in self.events.items():
            if only in (None, rank):
                events.append({"event": event, "time": round(self.time, 6), "rank": rank, **fields})

    def begin(self, *, attempt: int = 1, resumed_from: int | None = None, total: int = 10, **data: Any) -> None:
        self.tell("start", attempt=attempt, pid=1, world_size=self.ranks, resumed_from=resumed_from)
        self.tell("phase", after=0.1, name="prepare")
        rows = {"rows": 800, "rows_train": 760, "rows_eval": 40}
        facts = {"source": "builtin:instructions", "template": "alpaca", **rows}
        facts |= {"rows_truncated": 307, "rows_without_target": 1, "tokens_cut": 65903, "sequences": 515, "labels": {}}
        facts |= {"tokens_real": 130319, "tokens_trained": 100049, "fill": 0.9885, "vocab_size": 2048}
        self.tell("data", after=0.6, how="built", seconds=0.6, **(facts | data))
        self.tell("phase", name="build")
        model = {"parameters": 5198080, "parameters_trained": 1198080, "seconds": 1.4}
        self.tell("model", after=1.5, **model, device="cpu", torch="2.13.0", versions=VERSIONS, threads=1)
        if resumed_from is not None:
            self.tell("resume", from_step=resumed_from, inexact=False)
        self.tell("phase", name="prove")
        proof = {"weights_equal": True, "data_disjoint": True, "weights_hash": "884c3af1" * 8, "rows_checked": 515}
        self.tell("proof", after=0.1, world_size=self.ranks, **proof)
        self.tell("phase", name="train", total_steps=total, first_step=resumed_from or 0)

    def steps(self, first: int, last: int, *, every: int = 1, parts: bool = True, slow_rank: int | None = None) -> None:
        for done in range(first + every - 1, last + 1, every):
            base = 0.3 * (3 if done <= every else 1) * self.random.uniform(0.95, 1.1) + (0.4 if done % 97 == 0 else 0)
            self.time += base * every
            loss = 1.5 + 6 * math.exp(-done / max(last / 4, 3)) + self.random.gauss(0, 0.08)
            for rank in range(self.ranks):
                self._step(rank, done, every, base, loss, last, parts, slow_rank)

    def _step(self, rank: int, done: int, every: int, base: float, loss: float, last: int, parts: bool, slow: Any):
        tokens = self.random.randint(900, 1024) * every
        forward = base * (0.45 if rank != slow else 0.7)
        record: dict[str, Any] = {
            "step": done, "steps": every, "loss": loss, "lr": 5e-5 * (1 - done / (last + 1)),
            "grad_norm": self.random.uniform(0.5, 2), "tokens": tokens, "tokens_trained": tokens * 3 // 4,
            "tokens_padded": 1024 * every - tokens, "epoch": done / 64, "step_time_s": round(base, 6),
        }  # fmt: skip
        if parts:
            backward = base * 0.96 - forward - 0.01
            record |= {"data_s": 0.004, "forward_s": forward, "backward_s": backward, "optimizer_s": 0.006}
        if every > 1:
            record["step_times_s"] = [round(base * self.random.uniform(0.97, 1.03), 6) for _ in range(every)]
        memory = int((0.6 + 0.02 * rank) * GIB + 0.05 * GIB * self.random.random())
        record |= {"memory_bytes": memory, "peak_memory_bytes": int((0.66 + 0.02 * rank) * GIB)}
        self.events[rank].append({"event": "step", "time": self.time, "rank": rank, **record})

    def evaluate(
        self, step: int, *, loss: float, accuracy: float | None = None, exact: float | None = None, samples: Any = None
    ) -> None:
        self.tell("phase", name="evaluate", step=step)
        perplexity = None if accuracy is not None else math.exp(loss)
        more = {"exact_match": exact, "checked": 40 if exact is not None else 0, "samples": samples or []}
        more = more if accuracy is None else {}
        more |= {"loss": loss, "perplexity": perplexity, "accuracy": accuracy}
        self.tell("eval", only=0, after=0.6, step=step, targets=6169, rows=40, seconds=0.46, collectives=1, **more)
        self.tell("phase", name="train", step=step)

    def save(self, step: int) -> None:
        self.tell("phase", name="save", step=step)
        path = str(self.run.checkpoint(step))
        self.tell("checkpoint", after=0.04, step=step, mode="weights_only", seconds=0.0373, path=path)
        self.tell("phase", name="train", step=step)
        self.run.checkpoint(step).mkdir(exist_ok=True)
        files = {"adapter_model.safetensors": {"bytes": 4799768, "sha256": "0" * 64}}
        manifest = {"step": step, "mode": "weights_only", "created": self.time, "files": files}
        (self.run.checkpoint(step) / "manifest.json").write_text(json.dumps(manifest))

    def telemetry(self, *, gpus: int = 0, every: float = 1.0) -> None:
        for i, host in enumerate(self.hosts):
            lines, at = [], START - 2 + 0.3 * i
            while at < self.time:
                lines.append(json.dumps(self._sample(at, host, gpus)))
                at += every
            self.run.telemetry_of(host).write_text("\n".join(lines) + "\n")

    def _sample(self, at: float, host: str, gpus: int) -> dict[str, Any]:
        busy = self.random.uniform(0.9, 1.0) if at > START + 3 else 0.2
        return {
            "time": round(at, 3), "host": host, "cpu_percent": 100 * busy, "load1": 1.5,
            "memory_used_bytes": int((4 + 2 * busy) * GIB), "memory_total_bytes": 24 * GIB,
            "disk_free_bytes": 80 * GIB, "disk_read_bytes_per_s": 1e6 * self.random.random(),
            "disk_write_bytes_per_s": 5e5 * self.random.random(), "net_received_bytes_per_s": 2e8 * busy,
            "net_sent_bytes_per_s": 1.9e8 * busy, "loopback_bytes_per_s": 4e7 * busy,
            "gpus": [
                {"index": g, "utilisation_percent": int(97 * busy), "memory_used_bytes": (60 + g) * GIB,
                 "memory_total_bytes": 80 * GIB, "power_w": 640 * busy - 10 * g, "temperature_c": 60}
                for g in range(gpus)
            ],
        }  # fmt: skip

    def write(
        self,
        *,
        status: str = "succeeded",
        message: str | None = None,
        metrics: dict[str, Any] | None = None,
        env: list[dict[str, Any]] | None = None,
        plan: dict[str, Any] | None = None,
    ) -> RunDir:
        for rank, events in self.events.items():
            self.run.events_of(rank).write_text("".join(json.dumps(e) + "\n" for e in events))
        each = max(self.ranks // len(self.hosts), 1)
        ranks = [list(range(n * each, (n + 1) * each)) for n in range(len(self.hosts))]
        nodes = [{"node": n, "host": host, "ranks": ranks[n]} for n, host in enumerate(self.hosts)]
        threads = "2 usable cores / 2 ranks on the node; torchrun would set 1, plain Python all cores for every rank"
        interface = "one node: NCCL finds its own way"
        environment = env or [
            {"name": "OMP_NUM_THREADS", "value": "1", "reason": threads, "source": "policy"},
            {"name": "NCCL_SOCKET_IFNAME", "value": None, "reason": interface, "source": "policy"},
        ]
        base_plan = {
            "run_name": "demo", "launcher": "local", "strategy": "pytorch_ddp", "strategy_options": {"bucket_mb": 25.0},
            "device": "cpu", "backend": "gloo", "dtype": "float32", "world_size": self.ranks, "procs_per_node": each,
            "nodes": nodes, "rendezvous": "a free port on 127.0.0.1",
            "batch": {"micro_batch_size": 4, "grad_accum": 1, "global_batch_size": 4 * self.ranks}, "max_steps": 10,
            "epochs": None, "environment": environment, "warnings": [], "timeout_s": 600,
        } | (plan or {})  # fmt: skip
        self.run.plan.write_text(json.dumps(base_plan))
        self.run.spec.write_text("name: demo\nmodel:\n  name: tiny:mistral\ncluster:\n  env: {}\n")
        args = {"command": ["/bin/allranks", "run", "demo.yaml"], "python": "3.11.7", "allranks": "0.1.0"}
        self.run.run_args.write_text(json.dumps({**args, "started": "2026-11-20 23:05:03"}))
        checks = [("packages", "ok", ""), ("disk", "78GiB-free", "x")]
        checks = [{"name": name, "ok": True, "found": found, "cure": cure} for name, found, cure in checks]
        self.run.preflight.write_text(json.dumps([{"host": host, "checks": checks} for host in self.hosts]))
        self.run.metrics.write_text(json.dumps(self._metrics(status, message) | (metrics or {})))
        return self.run

    def _metrics(self, status: str, message: str | None) -> dict[str, Any]:
        done = [e for e in self.events.get(0, []) if e["event"] == "step"]
        found: dict[str, Any] = {
            "run_name": self.run.name, "status": status, "strategy": "pytorch_ddp", "world_size": self.ranks,
            "nodes": len(self.hosts), "device": "cpu", "model": "tiny:mistral", "dataset": "builtin:instructions",
            "use_lora": True, "dtype": "float32", "wall_time_s": self.time - START,
        }  # fmt: skip
        if done:
            found |= {
                "tokens_per_s": 6493.5,
                "tokens_per_s_per_rank": 3246.7,
                "step_time_s": {"median": 0.312, "p90": 0.329},
                "tokens_real": 40572,
                "tokens_trained": 31092,
                "tokens_padded": 388,
            }
        return found | ({"message": message} if message else {})


def answers(column: int) -> list[dict[str, str]]:
    """Sample answers: column 2 before training, 3 after."""
    prompt = "### Instruction:\n{}\n\n### Response:\n"
    return [{"prompt": prompt.format(s[0]), "expected": s[1], "reply": s[column]} for s in SAMPLES]


def complete_run(root: Path, name: str = "demo", steps: int = 10, **how: Any) -> RunDir:
    make = Maker(root, name, **how)
    make.begin(total=steps)
    make.evaluate(0, loss=7.7, exact=0.0, samples=answers(2))
    make.steps(1, steps)
    make.evaluate(steps, loss=2.1, exact=0.5, samples=answers(3))
    make.save(steps)
    make.tell("phase", name="done")
    make.telemetry()
    return make.write()


def failed_run(
    root: Path, name: str = "failed", message: str = "rank 1 on one failed after step 4: RuntimeError: out of memory"
) -> RunDir:
    """A run in which rank 1 failed, and rank 0 because of it."""
    make = Maker(root, name)
    make.begin()
    make.steps(1, 4)
    error = {"type": "RuntimeError", "step": None, "attempt": 1, "exit_code": 1, "known": False}
    make.tell("error", only=1, **error, message="out of memory", echo=False)
    make.tell("error", only=0, after=0.2, **error, message="Connection closed by peer", echo=True)
    text = "Traceback (most recent call last):\n  File \x1b[31mx.py\x1b[0m\nRuntimeError: out of memory\n"
    make.run.log_of(1, "one", 1).write_text(text)
    return make.write(status="failed", message=message)


@contextmanager
def served(run: RunDir) -> Iterator[str]:
    """The address of a run's page that `allranks watch --web` serves; an interrupt must end it well."""
    command = [sys.executable, "-m", "allranks.cli.main", "watch", "--web", str(run.root)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().split()[-1]
        finally:
            server.send_signal(signal.SIGINT)  # else the end of the outer block would wait for it
        assert server.wait(30) == 0
