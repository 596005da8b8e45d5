"""Bring vLLM to a GPU machine without a network, in three pieces of less than 50 MB.

    python -m lab.engines.vllm_pieces make FOLDER      here, once: minutes, and 3 GB of room for temporary files
    python -m lab.engines.vllm_pieces unpack FOLDER    there, whenever pieces have come; all three make vLLM

The public wheels, less what a Hopper GPU needs not. No file is changed: unpack compares them with the wheel's RECORD.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from io import BytesIO
from pathlib import Path

KIT = Path(tempfile.gettempdir()) / "vllm_kit"
VLLM = "vllm==0.26.0"  # the newest release that pins torch 2.11
SITE = (
    "annotated-types==0.8.0 apache-tvm-ffi==0.1.15.post2 astor==0.8.1 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0 "
    "compressed-tensors==0.17.0 depyf==0.20.0 dill==0.4.1 distro==1.9.0 fastapi==0.136.0 jiter==0.19.0 lark==1.2.2 "
    "jsonschema==4.26.0 jsonschema-specifications==2025.9.1 llguidance==1.7.0 loguru==0.7.3 msgspec==0.22.0 "
    "openai==2.54.0 openai-harmony==0.0.8 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1 pydantic==2.14.4 "
    "pydantic-core==2.50.5 pyzmq==27.3.0 referencing==0.37.0 rpds-py==2026.9.1 setproctitle==1.3.8 sniffio==1.3.1 "
    "starlette==1.10.0 typing-inspection==0.4.5 xgrammar==0.2.8"
)
"""Requirements of vLLM that do not come with torch, transformers and this package."""
SYSTEMS = (
    *(f"manylinux_2_{minor}" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)),
    "manylinux2014",
    "manylinux1",
)
PIP = (
    *("download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version=3.12", "--implementation=cp"),
    *("--abi=cp312", "--abi=abi3", "--abi=none", "--platform=any"),
    *(f"--platform={system}_x86_64" for system in SYSTEMS),
)
LEFT_OUT = (
    "vllm/_qutlass_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/vllm-rs",
    "vllm/third_party/fmha_sm100/",
    *(f"vllm/third_party/deep_gemm/_C.cpython-{python}" for python in (310, 311, 313, 314)),
)
XZ = ("xz", "-9e", "--threads=2", "--block-size=100MiB")
PIECES = 3
PIECE_BYTES = 50_000_000


def make(folder: Path) -> None:
    """Download the wheels, pack what is needed of them, and cut that into pieces."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for part, wheels in (("wheel", VLLM), ("site", SITE)):
            print(f"downloading {wheels[:60]}", flush=True)
            pip = [sys.executable, "-m", "pip", *PIP, "--dest", str(work / "wheels" / part)]
            subprocess.run([*pip, *wheels.split()], check=True)
        for path in (work / "wheels").glob("*/*.whl"):
            with zipfile.ZipFile(path) as wheel:
                needed = [name for name in wheel.namelist() if not name.startswith(LEFT_OUT)]
                wheel.extractall(work / path.parent.name, needed)
        files = [path for part in ("wheel", "site") for path in (work / part).rglob("*") if path.is_file()]
        total, done = sum(file.stat().st_size for file in files), 0
        with (work / "kit").open("wb") as kit, subprocess.Popen(XZ, stdin=subprocess.PIPE, stdout=kit) as xz:
            with tarfile.open(fileobj=xz.stdin, mode="w|") as tar:
                for file in files:
                    tar.add(file, str(file.relative_to(work)))
                    before, done = done, done + file.stat().st_size
                    if before * 20 // total < done * 20 // total:
                        print(f"{done / total:.0%} of {total / 1e6:.1f} MB given to xz", flush=True)
            xz.communicate()
        data = (work / "kit").read_bytes()
    if xz.returncode:
        raise RuntimeError(f"xz ended with {xz.returncode}")
    size = -(-len(data) // PIECES)
    if size >= PIECE_BYTES:
        raise ValueError(f"pieces: expected less than {PIECE_BYTES} bytes each, got {size}")
    for index in range(PIECES):
        piece = folder / f"c{index + 1}" / "kit.tar.xz.part"
        piece.parent.mkdir(parents=True, exist_ok=True)
        piece.write_bytes(data[index * size : (index + 1) * size])
        print(f"{piece}: {piece.stat().st_size / 1e6:.1f} MB", flush=True)


def unpack(folder: Path, kit: Path = KIT) -> None:
    """Keep the pieces that have come; with the last of them unpack vLLM, and check its files."""
    (kit / "pieces").mkdir(parents=True, exist_ok=True)
    for piece in folder.glob("c?/kit.tar.xz.part"):
        shutil.copyfile(piece, kit / "pieces" / piece.parent.name)
    pieces = sorted((kit / "pieces").iterdir())
    print(f"here are {', '.join(piece.name for piece in pieces) or 'no pieces'}, of {PIECES}", flush=True)
    if len(pieces) == PIECES:
        begin = time.monotonic()
        with tarfile.open(fileobj=BytesIO(b"".join(piece.read_bytes() for piece in pieces)), mode="r:xz") as tar:
            tar.extractall(kit, filter="data")
        print(f"unpacked in {time.monotonic() - begin:.1f} s; {check(kit / 'wheel')}")


def check(wheel: Path) -> str:
    """Compare files with the wheel's RECORD, and say how many are as it says."""
    (record,) = wheel.glob("*.dist-info/RECORD")
    rows = [(wheel / name, digest) for name, digest, _ in csv.reader(record.read_text().splitlines()) if digest]
    here = [(path, digest) for path, digest in rows if path.exists()]
    for path, expected in here:
        digest = base64.urlsafe_b64encode(hashlib.sha256(path.read_bytes()).digest()).decode().rstrip("=")
        if expected != f"sha256={digest}":
            raise ValueError(f"{path}: expected {expected}, got sha256={digest}")
    return f"{len(here)} files are as in RECORD, {len(rows) - len(here)} were left out"


if __name__ == "__main__":
    {"make": make, "unpack": unpack}[sys.argv[1]](Path(sys.argv[2]))
