"""Metadata and dependencies. Versions that the tests run with are pinned in constraints.txt alone."""

from pathlib import Path

from setuptools import find_packages, setup

README = Path(__file__).with_name("README.md")

setup(
    name="vcpo-megatron",
    version="0.1.0",
    description="Asynchronous reinforcement learning of language models on Megatron-core, with VCPO",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["vcpo_megatron", "vcpo_megatron.*"]),
    install_requires=[
        "torch>=2.11",
        "megatron-core>=0.16.1",
        "transformers>=5",
        "tokenizers>=0.21",
        "safetensors>=0.4",
        "numpy>=1.26",
        "pydantic>=2.7",
        "pyzmq>=26",
        "msgpack>=1.0",
        "psutil>=5.9",
        "tensorboard>=2.16",
        "rich>=13",
        "aiohttp>=3.9",
        "jinja2>=3.1",
    ],
    extras_require={
        "parquet": ["pyarrow>=15"],
        "math": ["math-verify[antlr4_13_2]>=0.8"],
        # Its torch part is built against the torch that is there: tools/make_gpu_env.sh installs them in order.
        "gpu": ["transformer-engine[core_cu13,pytorch]>=2.9,<2.12"],
        "mpi": ["mpi4py>=4"],
        "wandb": ["wandb>=0.19"],
        "mutation": ["cosmic-ray>=8.7"],
        "test": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.5",
            "hypothesis>=6.100",
            "pyarrow>=15",
            "math-verify[antlr4_13_2]>=0.8",
            "ruff>=0.9",
            "mypy>=1.13",
        ],
    },
    entry_points={"console_scripts": ["vcpo = vcpo_megatron.cli.main:main"]},
)
