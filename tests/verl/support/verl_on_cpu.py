"""A platform on which verl's trainer runs without an accelerator. For tests alone: verl supports none such.

Loaded by VERL_USE_EXTERNAL_MODULES, chosen by VERL_PLATFORM=cpu.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

MEMORY = 16 << 30


class Device(types.ModuleType):
    """Stands where `torch.cuda` stands: torch.cpu, and for what that lacks something that does nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(torch.cpu, name, lambda *_args, **_kwargs: 0)

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def mem_get_info(*_: Any) -> tuple[int, int]:
        return MEMORY, MEMORY

    @staticmethod
    def get_device_properties(*_: Any) -> Any:
        return types.SimpleNamespace(name="cpu", total_memory=MEMORY)

    @staticmethod
    def get_device_name(*_: Any) -> str:
        return "cpu"


DEVICE = Device("device_of_verl_on_cpu")


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = DEVICE

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None: ...

    def synchronize(self, device_index: int | None = None) -> None: ...

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings: str) -> None: ...

    def empty_cache(self) -> None: ...

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextlib.contextmanager
    def nvtx_range(self, message: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None: ...

    def profiler_stop(self) -> None: ...

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_resource_options(self, num: float) -> dict[str, float]:
        return {"num_gpus": num}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> None:
        return None

    def rollout_env_vars(self) -> dict[str, str]:
        return {}

    def get_collective_module(self) -> None:
        return None


_init_process_group = torch.distributed.init_process_group


def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
    """verl names a backend for the CPU and one for the device, which is the CPU here."""
    _init_process_group("cpu:gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **kwargs)


torch.distributed.init_process_group = init_process_group
