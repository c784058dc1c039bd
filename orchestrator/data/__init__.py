"""Data sets, the long-tailed cut, the partitions among clients and their local tests."""

from orchestrator.data.datasets import DATASETS, Dataset, load, outline
from orchestrator.data.files import ImageFiles
from orchestrator.data.maps import VOID
from orchestrator.data.readers import Absent, DataError
from orchestrator.data.sources import SOURCES
from orchestrator.data.splits import Split, check, describe, split

__all__ = [
    "DATASETS", "SOURCES", "VOID", "Absent", "DataError", "Dataset", "ImageFiles", "Split", "check", "describe", "load",
    "outline", "split",
]  # fmt: skip
