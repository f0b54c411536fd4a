"""The one thing pyproject.toml cannot say in stable form: the C extension, which may fail to build."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "kvstore.pipeline._kernels",
            sources=["pipeline/_kernels.c"],
            extra_compile_args=["-O3", "-std=c11", "-fno-math-errno"],
            optional=True,  # without a compiler the numpy fallback serves, with the same results
        )
    ]
)
