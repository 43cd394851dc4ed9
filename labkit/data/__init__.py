"""Data sets in memory, and each rank's share of them."""

from .datasets import NAMES, load
from .download import cache_folder
from .errors import DataError, NotAvailableError
from .feeds import Batch, Feed, ShardFeed
from .shards import Part, Shard, share
from .tensors import Dataset, Tensors, from_tensors

__all__ = [
    "NAMES",
    "Batch",
    "DataError",
    "Dataset",
    "Feed",
    "NotAvailableError",
    "Part",
    "Shard",
    "ShardFeed",
    "Tensors",
    "cache_folder",
    "from_tensors",
    "load",
    "share",
]
