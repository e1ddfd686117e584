"""The version of the package."""

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

try:
    __version__ = version("pgdefer")
except PackageNotFoundError:  # run from the sources
    __version__ = "0.1.0"
