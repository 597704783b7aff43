"""Installs harness_s_jax, experiments and launch; requirements.txt is the one list of pins."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist


def requirements() -> list[str]:
    """The lines of requirements.txt, comments and blank lines left out."""
    text = (Path(__file__).parent / "requirements.txt").read_text(encoding="utf-8")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def jax_with(extra: str) -> list[str]:
    """jax with one of its extras, pinned as in requirements.txt for each Python."""
    pins = [line for line in requirements() if line.startswith(("jax=", "jax>"))]
    return [line.replace("jax", f"jax[{extra}]", 1) for line in pins]


class SdistWithRequirements(sdist):
    """Puts requirements.txt in the source archive, since this file reads it."""

    def make_distribution(self) -> None:
        self.filelist.append("requirements.txt")
        super().make_distribution()


setup(
    name="harness_s_jax",
    version="0.1.0",
    description="Harness-S in JAX: train a language-model agent by learning from sibling harnesses",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["harness_s_jax*", "experiments*", "launch*"]),
    package_data={
        "harness_s_jax": ["py.typed", "assets/**/*", "harness/pool/*.yaml"],
        "launch": ["*.sh"],
    },
    install_requires=requirements(),
    extras_require={
        "tpu": jax_with("tpu"),
        "cuda": jax_with("cuda13"),  # NVIDIA driver 580 or newer
        "cuda12": jax_with("cuda12"),  # older drivers
        "dev": [
            "pytest>=9",
            "pytest-xdist",
            "hypothesis",
            "jinja2",  # renders Qwen's own chat template, which ours is compared with
            "ruff",
            "pyright[nodejs]",  # brings its own node
            "pre-commit",
        ],
    },
    cmdclass={"sdist": SdistWithRequirements},
)
