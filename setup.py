"""The one thing pyproject.toml cannot say in stable form: the C extension, which may fail to build."""

from pathlib import Path

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvstore.pipeline._kernels",
            sources=["pipeline/_kernels.c"],
            depends=[str(path) for path in sorted(Path("pipeline").glob("_*.h"))],
            # No fused multiply-add: all instruction sets and numpy give the same bits.
            extra_compile_args=["-O3", "-std=c11", "-ffp-contract=off"],
            optional=True,  # without a compiler the numpy fallback serves, with the same results
        )
    ]
)
