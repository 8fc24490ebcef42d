"""The one part of the package that is compiled: kernels for the CPU. Without a compiler the package installs all the
same and uses torch's (foreglance says so when it loads a model)."""

import runpy
import sys

from setuptools import Extension, setup

SOURCES = ["module.c", "isa_portable.c", "isa_neon.c", "isa_avx2.c", "isa_avxvnni.c", "isa_avx512.c"]
FLAGS = [] if sys.platform == "win32" else ["-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-g0"]

DIGEST = runpy.run_path("src/foreglance/ops/sources.py")["digest"]()

setup(
    ext_modules=[
        Extension(
            "foreglance.ops._native",
            [f"src/foreglance/ops/csrc/{name}" for name in SOURCES],
            depends=[f"src/foreglance/ops/csrc/{name}" for name in ("fg.h", "kernels.h")],
            extra_compile_args=FLAGS,
            define_macros=[("FG_SOURCES", f'"{DIGEST}"')],
            py_limited_api=True,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
