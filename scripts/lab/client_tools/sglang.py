"""The client side of SGLang: `sglang.bench_serving`, which needs no CUDA, out of a wheel that is not installed.

SGLang requires several gigabytes of what engines need. Its load generator needs some small packages; what it imports of
the rest is a constant, and a package that only other data sets load.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from lab.common import environment

VERSION = "0.5.23"
_DIRECTORY = environment.PYTHON.parents[1] / f"sglang-{VERSION}"
_NEEDS = (
    *("aiohttp", "msgspec", "numpy", "orjson", "pillow", "psutil", "pybase64", "pyzmq", "requests", "tqdm"),
    "transformers<6",
)
_PARTS = ("sglang/bench_serving.py", "sglang/benchmark/", "sglang/srt/environ.py", "sglang/srt/utils/network.py")
_IN_PLACE_OF_OTHERS = {
    "sglang/srt/disaggregation/utils.py": 'FAKE_BOOTSTRAP_HOST = "2.2.2.2"\n',
    "datasets.py": "load_dataset = None\n",
}
# Its files are the same for every platform, so that any wheel will do.
_ANY_WHEEL = ("--platform", "manylinux_2_34_x86_64", "--python-version", "3.11", "--only-binary", ":all:", "--no-deps")


def provide() -> Path | None:
    """The directory to import it from, made when it is first needed; None when it cannot be had."""
    if not environment.provide(_NEEDS):
        return None
    if not _DIRECTORY.exists():
        with tempfile.TemporaryDirectory(dir=_DIRECTORY.parent) as temporary:
            wheel = _download(Path(temporary))
            if wheel is None:
                return None
            _unpack(wheel, Path(temporary) / "unpacked")
            (Path(temporary) / "unpacked").rename(_DIRECTORY)
    return _DIRECTORY.absolute()


def _download(directory: Path) -> Path | None:
    print(f"fetching the client side of sglang {VERSION} (40 MB, once)", file=sys.stderr, flush=True)
    pip = [str(environment.PYTHON), "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run([*pip, *_ANY_WHEEL, "--dest", str(directory), f"sglang=={VERSION}"], check=False)
    return next(directory.glob("*.whl"), None) if done.returncode == 0 else None


def _unpack(wheel: Path, directory: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if name.startswith(_PARTS)])
    for name, text in _IN_PLACE_OF_OTHERS.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
