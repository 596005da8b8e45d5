"""Build replay.c if a C compiler, Python.h and a GIL are found; otherwise the package is Python alone."""

import os
import shlex
import subprocess
import sysconfig
import tempfile
import zlib
from pathlib import Path

from setuptools import Extension, setup

SOURCE = "deep_gemm/core/replay.c"
FLAGS = ["-std=c11", "-O2", "-g0", f"-DSOURCE_DIGEST={zlib.crc32(Path(SOURCE).read_bytes())}"]
COMPILER = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
TRY = [*COMPILER, *FLAGS, "-fsyntax-only", f"-I{sysconfig.get_path('include')}", SOURCE]

try:
    subprocess.run(TRY, check=True)
    extensions = [
        Extension("deep_gemm.core._replay", [SOURCE], py_limited_api=True, optional=True, extra_compile_args=FLAGS)
    ]
except (OSError, subprocess.CalledProcessError) as error:
    print(f"deep_gemm: calls will be replayed in Python, as replay.c cannot be built here: {error}")
    extensions = []

with tempfile.TemporaryDirectory() as folder:  # so that no file of an earlier build gets into a wheel
    options = {"build": {"build_base": folder}, "egg_info": {"egg_base": folder}}
    if extensions:
        options["bdist_wheel"] = {"py_limited_api": "cp310"}
    setup(ext_modules=extensions, options=options)
