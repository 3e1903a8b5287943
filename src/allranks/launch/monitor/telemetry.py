"""Sample a node every second: CPU, memory, disk, network, GPU. One thread in the node's agent, no torch."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import psutil

from allranks.rundir.files import open_append

_encoder = msgspec.json.Encoder()


class TelemetrySampler(threading.Thread):
    """Append one JSON line per interval until `stop` is called."""

    def __init__(self, path: Path, interval_s: float, host: str, disk: Path) -> None:
        super().__init__(name="telemetry", daemon=True)
        self._path = path
        self._interval_s = interval_s
        self._host = host
        self._disk = disk
        self._ended = threading.Event()

    def run(self) -> None:
        gpus = GpuProbe()
        rates = _Rates()
        psutil.cpu_percent(None)
        try:
            with os.fdopen(open_append(self._path), "ab", buffering=0) as file:
                while not self._ended.wait(self._interval_s):
                    file.write(_encoder.encode(self._sample(rates, gpus)) + b"\n")
        except OSError as error:  # a full disk ends the telemetry, not the training
            print(f"allranks: telemetry of {self._host} stopped: {error}", flush=True)  # noqa: T201 - agent's log
        finally:
            gpus.close()

    def _sample(self, rates: _Rates, gpus: GpuProbe) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        return {
            "time": round(time.time(), 3),
            "host": self._host,
            "cpu_percent": psutil.cpu_percent(None),
            "load1": os.getloadavg()[0],
            "memory_used_bytes": memory.total - memory.available,
            "memory_total_bytes": memory.total,
            "disk_free_bytes": psutil.disk_usage(str(self._disk)).free,
            **rates.sample(),
            "gpus": gpus.sample(),
        }

    def stop(self) -> None:
        """Stop after the current sample."""
        self._ended.set()
        self.join(timeout=2)


class _Rates:
    """Convert disk and network counters to bytes per second since the last call."""

    def __init__(self) -> None:
        self._last = self._counters()
        self._at = time.monotonic()

    @staticmethod
    def _counters() -> dict[str, int]:
        disk = psutil.disk_io_counters()
        net = psutil.net_io_counters(pernic=True)
        outer = [v for k, v in net.items() if k != "lo"]
        return {
            "disk_read_bytes_per_s": disk.read_bytes if disk else 0,
            "disk_write_bytes_per_s": disk.write_bytes if disk else 0,
            "net_received_bytes_per_s": sum(v.bytes_recv for v in outer),
            "net_sent_bytes_per_s": sum(v.bytes_sent for v in outer),
            "loopback_bytes_per_s": net["lo"].bytes_sent if "lo" in net else 0,
        }

    def sample(self) -> dict[str, float]:
        now, counters = time.monotonic(), self._counters()
        span = max(now - self._at, 1e-9)
        rates = {name: round((value - self._last[name]) / span, 1) for name, value in counters.items()}
        self._last, self._at = counters, now
        return rates


class GpuProbe:
    """Read NVML samples; an empty list without a driver or nvidia-ml-py."""

    def __init__(self) -> None:
        self._nvml: ModuleType | None = None
        self._handles: list[Any] = []
        try:
            import pynvml  # pyright: ignore[reportMissingImports] - installed by nvidia-ml-py

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        except ImportError:
            return
        except Exception as error:
            if type(error).__module__.split(".")[0] != "pynvml":
                raise

    def sample(self) -> list[dict[str, Any]]:
        """Return utilisation in percent, memory in bytes, power in watts and PCIe in bytes per second, for each GPU."""
        return [self._one(i, handle) for i, handle in enumerate(self._handles)]

    def _one(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        assert nvml is not None
        pcie = nvml.nvmlDeviceGetPcieThroughput
        row: dict[str, Any] = {"index": index}
        readings = {
            "utilisation_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "pcie_sent_bytes_per_s": lambda: 1024 * pcie(handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
            "pcie_received_bytes_per_s": lambda: 1024 * pcie(handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
        }
        for name, read in readings.items():
            try:
                row[name] = read()
            except nvml.NVMLError:  # not every GPU reports every value
                row[name] = None
        return row

    def close(self) -> None:
        """Shut down NVML."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
